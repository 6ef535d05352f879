"""Find the device, precision and rank of this process; check that the machine supports them."""

from __future__ import annotations

import atexit
import os
import re
import resource
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch.distributed import FileStore, HashStore, Store  # type: ignore[attr-defined]

from rlhf.base.command import set_cuda_allocator
from rlhf.base.errors import CapabilityError
from rlhf.base.ranks import Ranks
from rlhf.config.choices import Device, Dtype
from rlhf.config.machine_rates import resolve_cpu_dtype
from rlhf.config.schema.hardware import HardwareConfig

DRIVER_FILE = Path("/proc/driver/nvidia/version")
OLDEST_DRIVERS = {"13": 580, "12": 525, "11": 450}  # CUDA version -> oldest driver that supports it
TORCH_DTYPES = {
    Dtype.fp32: torch.float32,
    Dtype.bf16: torch.bfloat16,
    Dtype.fp16: torch.float16,
}
BF16_CAPABILITY = (8, 0)  # the first GPUs with bf16 arithmetic (Ampere); older ones emulate it


def resolve_dtype(dtype: Dtype, device: Device) -> Dtype:
    """Return ``dtype``, with ``auto`` replaced by the best precision of this machine.

    Raises:
        CapabilityError: if this machine cannot compute in ``dtype``.
    """
    if device is Device.cpu:
        return resolve_cpu_dtype(dtype)
    has_bf16 = torch.version.hip is not None or (
        torch.cuda.get_device_capability() >= BF16_CAPABILITY
    )
    if dtype is Dtype.bf16 and not has_bf16:
        raise CapabilityError(
            f"hardware.dtype=bf16: {torch.cuda.get_device_name()} only emulates bf16; use "
            "hardware.dtype=fp16, or hardware.dtype=auto, which is fp16 here"
        )
    if dtype is not Dtype.auto:
        return dtype
    return Dtype.bf16 if has_bf16 else Dtype.fp16


def check_devices(hardware: HardwareConfig) -> None:
    """Raise CapabilityError if this machine lacks the devices or the precision of ``hardware``."""
    if hardware.device is Device.cuda:
        check_gpus(hardware.ranks_per_node)
    resolve_dtype(hardware.dtype, hardware.device)


def check_gpus(ranks_per_node: int) -> None:
    """Raise CapabilityError unless each rank of this node has a GPU that torch has kernels for."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not count:
        raise CapabilityError(
            "hardware.device=cuda: torch finds no GPU here; use hardware=cpu, or "
            f"{_missing_gpu_advice()} (plan=only needs no GPU)"
        )
    if count < ranks_per_node:
        raise CapabilityError(
            f"hardware.ranks_per_node={ranks_per_node}: torch finds {count} GPU{'s' * (count > 1)} "
            f"here, and each rank needs its own; use hardware.ranks_per_node={count}, or check "
            "CUDA_VISIBLE_DEVICES"
        )
    capability, kernels = torch.cuda.get_device_capability(), torch.cuda.get_arch_list()
    if kernels and not _has_kernels(kernels, capability):
        raise CapabilityError(
            f"hardware.device=cuda: {torch.cuda.get_device_name()} "
            f"(sm_{capability[0]}{capability[1]}) is not a GPU that this build of torch supports "
            f"({', '.join(kernels)}); install a build of torch for CUDA 12.6, which has them for "
            "older GPUs, or use hardware=cpu"
        )


def best_device() -> Device:
    """Return cuda if torch can compute on a GPU of this machine, otherwise cpu."""
    try:
        check_gpus(1)
    except CapabilityError:
        return Device.cpu
    return Device.cuda


def supported_dtype_or_fp32(dtype: Dtype, device: Device) -> Dtype:
    """Return ``dtype`` (auto: the best) if ``device`` supports it, otherwise fp32.

    Weights of any supported precision are exact in fp32.
    """
    try:
        return resolve_dtype(dtype, device)
    except CapabilityError:
        return Dtype.fp32


def _missing_gpu_advice() -> str:
    if torch.version.cuda is None:
        return "install a CUDA build of torch and check nvidia-smi"
    driver = read_driver_version()
    needed = OLDEST_DRIVERS.get(torch.version.cuda.partition(".")[0])
    if driver is not None and needed is not None and int(driver.partition(".")[0]) < needed:
        return (
            f"update the NVIDIA driver {driver} to {needed} or newer, which this torch (CUDA "
            f"{torch.version.cuda}) needs; or install a torch for an older CUDA"
        )
    return "check nvidia-smi and CUDA_VISIBLE_DEVICES"


def read_driver_version(file: Path = DRIVER_FILE) -> str | None:
    """Return the version of NVIDIA's driver, such as 535.104.05; None if no driver is loaded."""
    try:
        match = re.search(r"Kernel Module .*?(\d+\.[\d.]+)", file.read_text())
    except OSError:
        return None
    return match and match[1]


def _has_kernels(kernels: list[str], capability: tuple[int, int]) -> bool:
    """Return True if one of ``kernels``, such as sm_80, runs on GPUs of this capability.

    A kernel runs on GPUs of its own generation with the same or a later revision, PTX (compute_80)
    on all later GPUs, and a kernel such as sm_90a only on GPUs of exactly its capability.
    """
    for kernel in kernels:
        match = re.fullmatch(r"(\w+)_(\d+)(\d)(\D?)", kernel)
        assert match is not None, kernel
        prefix, major, minor, exact = match.groups()
        target = int(major), int(minor)
        is_same_generation = prefix == "compute" or target[0] == capability[0]
        if target == capability or (is_same_generation and target < capability and exact != "a"):
            return True
    return False


def current_ranks(device: Device) -> Ranks:
    """Return this process's rank, world size and device; start a process group if there is none."""
    place = select_device(device)
    if not torch.distributed.is_initialized():
        start_process_group(device, store=_build_one_rank_store(device), rank=0, world_size=1)
        if device is Device.cuda:
            # Without this, NCCL prints a warning at exit.
            atexit.register(torch.distributed.destroy_process_group)
    return Ranks(torch.distributed.get_rank(), torch.distributed.get_world_size(), place)


def select_device(device: Device) -> torch.device:
    """Select and return the device of this process for torch and DeepSpeed.

    Raises:
        CapabilityError: if ``device`` is cuda and ``check_gpus`` finds no usable GPU for this rank.
    """
    # DeepSpeed reads its accelerator and local rank from the environment at its first import.
    os.environ["DS_ACCELERATOR"] = device.value
    local_rank = int(os.environ.setdefault("LOCAL_RANK", "0"))
    if device is not Device.cuda:
        return torch.device("cpu")
    set_cuda_allocator()
    check_gpus(local_rank + 1)
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)


def set_torch_threads(count: int) -> None:
    """Set torch's number of threads to ``count``, and make them replace denormal numbers with 0.

    Intel's CPUs take up to 100 times as long for a product with a denormal number, such as the
    second moment of a weight whose gradient is tiny. A thread inherits the setting from the thread
    that starts it, so call this before the first operation of torch that uses several threads.
    """
    torch.set_flush_denormal(True)
    torch.set_num_threads(count)


def start_process_group(device: Device, **how: Any) -> None:
    """Start the process group of all ranks, with gloo or, on GPUs, with NCCL.

    NCCL gets the GPU that ``select_device`` has selected, and therefore connects at once: a failure
    ends the run here instead of in the first step.
    """
    if device is Device.cuda:
        how["device_id"] = torch.device("cuda", torch.cuda.current_device())
    backend = "nccl" if device is Device.cuda else "gloo"
    torch.distributed.init_process_group(backend, **how)


def _build_one_rank_store(device: Device) -> Store:
    """Return a store for a group of one rank: on a GPU a file, because NCCL's threads share it."""
    if device is Device.cpu:
        return HashStore()
    folder = tempfile.mkdtemp(prefix="rlhf-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return FileStore(f"{folder}/store", 1)


def reset_peak_memory(ranks: Ranks) -> None:
    """Reset the GPU's peak memory; on a CPU do nothing: a process cannot reset its peak."""
    if ranks.device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(ranks.device)


def peak_memory_gib(ranks: Ranks) -> float:
    """Return the highest peak memory of any rank in GiB; on GPUs only torch's memory counts."""
    if ranks.device.type == "cuda":
        peak = torch.cuda.max_memory_reserved(ranks.device) / 2**30
    else:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    return float(ranks.max(torch.tensor(peak, dtype=torch.float64, device=ranks.device)))
