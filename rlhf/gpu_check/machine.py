"""Report the card, its driver and the package versions, on which all figures depend."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from pathlib import Path

import torch

from rlhf.base.versions import installed_version
from rlhf.config.choices import Device, Dtype
from rlhf.config.machine_rates import GIB
from rlhf.engine.devices import read_driver_version, resolve_dtype
from rlhf.gpu_check.rows import CARD, CheckRow, Size, Task, checked_row, measured_row
from rlhf.jobs.this_machine import CPU, find_hardware

PACKAGES = ("rlhf", "torch", "deepspeed", "transformers", "datasets", "peft", "hydra-core")
LEAST_FREE = 2  # GiB of free GPU memory that the other parts need


def check_machine(_folder: Path, _size: Size) -> Iterator[Task]:
    """Yield tasks that describe this machine and check that torch computes on its GPU."""
    yield CARD, _describe_card
    yield "free memory", _check_free_memory
    yield "driver and CUDA", _describe_driver
    yield "kernels of torch", lambda: measured_row(", ".join(torch.cuda.get_arch_list()))
    yield "a product", _check_matmul
    yield "hardware=auto", _check_auto_profile
    yield "host", _describe_host
    versions = (f"{package} {installed_version(package)}" for package in PACKAGES)
    yield "versions", lambda: measured_row(", ".join(versions))


def _describe_card() -> CheckRow:
    major, minor = torch.cuda.get_device_capability()
    total, count = torch.cuda.get_device_properties(0).total_memory, torch.cuda.device_count()
    figure = f"{torch.cuda.get_device_name()}, sm_{major}{minor}, {total / GIB:.1f} GiB"
    return measured_row(f"{figure}; {count} found", memory_gib=total / GIB, gpus=count)


def _check_free_memory() -> CheckRow:
    free, total = (size / GIB for size in torch.cuda.mem_get_info())
    figure, expected = f"{free:.1f} of {total:.1f} GiB", f"at least {LEAST_FREE} GiB"
    return checked_row(free >= LEAST_FREE, figure, expected, free_gib=free, total_gib=total)


def _describe_driver() -> CheckRow:
    cuda = torch.version.cuda or torch.version.hip
    return measured_row(f"driver {read_driver_version() or 'unknown'}, CUDA {cuda} of torch")


def _check_matmul() -> CheckRow:
    """Multiply matrices of ones; the sums, 64, are exact in fp32, fp16 and bf16."""
    dtypes = [torch.float32, torch.float16]
    if resolve_dtype(Dtype.auto, Device.cuda) is Dtype.bf16:
        dtypes.append(torch.bfloat16)
    for dtype in dtypes:
        ones = torch.ones(64, 64, dtype=dtype, device="cuda")
        if not bool((ones @ ones == 64).all()):  # noqa: PLR2004
            return checked_row(False, f"wrong in {dtype}", "64")
    names = ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
    return checked_row(True, f"right in {names}", "64")


def _check_auto_profile() -> CheckRow:
    machine = find_hardware()
    figure = f"{machine.profile}: {machine.reason}"
    return checked_row(machine.profile != CPU, figure, "a GPU's profile")


def _describe_host() -> CheckRow:
    cores = len(os.sched_getaffinity(0))
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / GIB
    figure = f"{cores} cores, {memory:.0f} GiB, Python {platform.python_version()}"
    return measured_row(figure, cores=cores)
