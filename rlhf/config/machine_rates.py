"""The memory, rates and precision of the machine that a run is planned for.

rlhf/jobs/measure_cpu.py measures the rates of this CPU once.
"""

from __future__ import annotations

import json
import os
import re
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from rlhf.base.atomic import replace_atomically
from rlhf.base.cpu import (
    ONEDNN_MAX_ISA,
    Isa,
    cache_folder,
    can_train_fp16,
    multiplies_bf16,
    num_jobs_on_machine,
    num_usable_cores,
    read_cgroup_limits,
    read_cpu,
    usable_isa,
)
from rlhf.base.errors import CapabilityError
from rlhf.config.choices import Device, Dtype
from rlhf.config.schema.hardware import HardwareConfig

GIB = 2**30
GB = 10**9
LAUNCH_SECONDS = 3e-5  # host time per torch operation on a GPU: benchmarks/gpu.md
HOST_MEMORY_BANDWIDTH = 150 * GB  # bytes per second of a node: estimate, two sockets with DDR4


@dataclass(frozen=True, kw_only=True)
class CpuRates:
    """The combined rates of all CPU cores that this process may use."""

    bf16_tflops: float
    """Tflop/s of large matrix products; 0 if bf16 is not native and so was not measured."""
    fp32_tflops: float
    bandwidth_gb: float
    """Gigabytes per second (1e9) read from memory."""
    call_microseconds: float
    """Microseconds per call of a small torch operation."""
    is_measured: bool = True
    was_busy: bool = False
    """True if other programs used the CPU during the measurement; the next run measures again."""


# Tflop/s of one core in bf16 and fp32: measured on a Xeon with AMX and an EPYC with AVX512-BF16,
# and guessed for older CPUs.
TFLOPS_BY_ISA = {
    Isa.amx: (0.8, 0.17),
    Isa.avx512_bf16: (0.4, 0.1),
    Isa.avx2: (0.0, 0.05),
    Isa.none: (0.0, 0.02),
}


def cpu_rates() -> CpuRates:
    """Return the rates measured on this machine, or typical rates if there are none."""
    try:
        return CpuRates(**json.loads(rates_file().read_text()))
    except (OSError, ValueError, TypeError):  # the file is missing or from another version
        return typical_rates()


def typical_rates() -> CpuRates:
    """Return estimated rates of a CPU with the instruction set and number of cores of this CPU."""
    bf16, fp32 = TFLOPS_BY_ISA[usable_isa()]
    return CpuRates(
        bf16_tflops=bf16 * num_usable_cores(),
        fp32_tflops=fp32 * num_usable_cores(),
        bandwidth_gb=20.0,
        call_microseconds=4.0,
        is_measured=False,
    )


def store_rates(rates: CpuRates) -> None:
    """Write ``rates`` to the file that ``cpu_rates`` reads; ignore errors of the drive."""
    path = rates_file()
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with replace_atomically(path, shared=True) as building:
            building.write_text(json.dumps(asdict(rates), indent=1))


def rates_file() -> Path:
    """Return the path of the rates file for this CPU, its usable cores and instruction sets."""
    caps = [usable_isa().name, os.environ.get(ONEDNN_MAX_ISA, "")]
    words = [read_cpu().name, f"{num_usable_cores()} cores", *filter(None, caps)]
    return cache_folder() / f"rates-{re.sub('[^a-zA-Z0-9]+', '-', ' '.join(words))}.json"


def lacks_rates(hardware: HardwareConfig) -> bool:
    """Return True if a plan for ``hardware`` needs CPU rates not yet measured on an idle CPU."""
    return (
        hardware.device is Device.cpu
        and None in (_configured_tflops(hardware), hardware.memory_bandwidth_gb)
        and (not cpu_rates().is_measured or cpu_rates().was_busy)
    )


def resolve_cpu_dtype(dtype: Dtype) -> Dtype:
    """Return ``dtype``, with ``auto`` replaced by the best precision of this CPU.

    Raises:
        CapabilityError: if ``dtype`` is fp16 and this CPU cannot train in it.
    """
    if dtype is Dtype.fp16 and not can_train_fp16():
        raise CapabilityError(
            f"hardware.dtype=fp16: {read_cpu().name} has no fp16 arithmetic, and DeepSpeed refuses "
            f"to emulate it; use hardware.dtype=auto, which is {resolve_cpu_dtype(Dtype.auto)} here"
        )
    if dtype is not Dtype.auto:
        return dtype
    return Dtype.bf16 if multiplies_bf16() else Dtype.fp32


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Memory and rates of a machine, in bytes, bytes/s and FLOPs/s (``operations``).

    Memory and rates are per rank, or per node if the name ends in ``of_node``.
    """

    ranks: int
    nodes: int
    is_gpu: bool
    dtype: Dtype
    fp32_logits: bool
    memory: float
    host_memory_of_node: float
    operations: float
    bandwidth: float
    link: float
    network_of_node: float
    host_link: float
    nvme_of_node: float
    price_per_hour: float | None
    """US dollars per hour for all nodes."""
    training_share: float | None = None
    """Share of ``operations`` that training reaches, if it is known for this machine."""
    call_seconds: float = 0.0
    """Seconds of the host for one torch operation, however small."""
    is_estimated: bool = False
    """True if the rates are estimates for a CPU that was not measured."""

    @property
    def ranks_per_node(self) -> int:
        """Return the number of ranks per node."""
        return self.ranks // self.nodes


def machine_of(hardware: HardwareConfig, rates: CpuRates | None = None) -> Machine:
    """Return the machine that ``hardware`` describes; read values that are null from this machine.

    ``rates`` replace the rates measured on this machine's CPU.
    """
    is_gpu = hardware.device is Device.cuda
    dtype = _assumed_dtype(hardware)
    memory = hardware.memory_gib * GIB if hardware.memory_gib else _machine_memory_bytes()
    host = hardware.host_memory_gib * GIB if hardware.host_memory_gib else _machine_memory_bytes()
    host /= num_jobs_on_machine()
    if not is_gpu:  # jobs share a CPU's memory; each has its own GPUs
        memory /= num_jobs_on_machine()
    tflops = _configured_tflops(hardware)
    bandwidth, is_estimated = hardware.memory_bandwidth_gb, False
    call_seconds = LAUNCH_SECONDS
    if not is_gpu:
        rates = rates or cpu_rates()
        is_estimated = not rates.is_measured and None in (tflops, bandwidth)
        if tflops is None:  # without native bf16, use the fp32 rate
            tflops = rates.fp32_tflops if dtype is Dtype.fp32 else rates.bf16_tflops
            tflops = tflops or rates.fp32_tflops
        bandwidth = bandwidth or rates.bandwidth_gb
        call_seconds = rates.call_microseconds * 1e-6
    assert tflops is not None, "null is refused for GPUs"
    assert bandwidth is not None
    # The ranks on a CPU share its cores, memory and bandwidth.
    share = 1 if is_gpu else hardware.ranks_per_node
    price = hardware.price_per_hour
    return Machine(
        ranks=hardware.nodes * hardware.ranks_per_node,
        nodes=hardware.nodes,
        is_gpu=is_gpu,
        dtype=dtype,
        fp32_logits=hardware.keeps_fp32_logits,
        memory=memory / share,
        host_memory_of_node=host,
        operations=tflops * 1e12 / share,
        bandwidth=bandwidth * GB / share,
        link=hardware.link_bandwidth_gb * GB,
        network_of_node=hardware.network_bandwidth_gb * GB,
        host_link=hardware.host_bandwidth_gb * GB,
        nvme_of_node=hardware.nvme_bandwidth_gb * GB,
        price_per_hour=None if price is None else price * hardware.nodes,
        training_share=hardware.training_share,
        call_seconds=call_seconds,
        is_estimated=is_estimated,
    )


def _assumed_dtype(hardware: HardwareConfig) -> Dtype:
    """Return the dtype that auto selects; assume bf16 on GPUs, which may be on another machine."""
    if hardware.device is Device.cpu:
        return resolve_cpu_dtype(hardware.dtype)
    return Dtype.bf16 if hardware.dtype is Dtype.auto else hardware.dtype


def _configured_tflops(hardware: HardwareConfig) -> float | None:
    """Return the peak in Tflop/s that ``hardware`` sets for the run's precision, or None."""
    is_fp32 = _assumed_dtype(hardware) is Dtype.fp32
    return hardware.fp32_tflops if is_fp32 else hardware.peak_tflops


def _machine_memory_bytes() -> int:
    """Return the memory of this machine in bytes, or the container's limit if it is lower."""
    installed = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit = read_cgroup_limits().memory
    return installed if limit is None else min(installed, limit)
