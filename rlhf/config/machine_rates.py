"""Convert the hardware configuration to the bytes and rates that a plan uses."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from rlhf.config.choices import Device, Dtype
from rlhf.config.cpu_rates import CpuRates, cpu_rates
from rlhf.config.precision import cpu_dtype
from rlhf.config.schema.hardware import HardwareConfig

GIB = 2**30
GB = 10**9
LAUNCH_SECONDS = 7e-6  # for Python to launch one kernel: an estimate
HOST_MEMORY_BANDWIDTH = 150 * GB  # bytes per second of a node: estimate, two sockets with DDR4


@dataclass(frozen=True, kw_only=True)
class Machine:
    """A machine in bytes, bytes per second and FLOPs per second (``operations``).

    Values are per rank, or per node if the name ends in ``of_node``.
    """

    ranks: int
    nodes: int
    is_gpu: bool
    dtype: Dtype
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
    tflops = hardware.fp32_tflops if dtype is Dtype.fp32 else hardware.peak_tflops
    bandwidth, is_estimated = hardware.memory_bandwidth_gb, False
    call_seconds = LAUNCH_SECONDS
    if not is_gpu:
        rates = rates or cpu_rates()
        is_estimated = not rates.is_measured and None in (tflops, bandwidth)
        if tflops is None:  # emulated bf16 is at best as fast as fp32
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
        memory=memory / share,
        host_memory_of_node=host,
        operations=tflops * 1e12 / share,
        bandwidth=bandwidth * GB / share,
        link=hardware.link_bandwidth_gb * GB,
        network_of_node=hardware.network_bandwidth_gb * GB,
        host_link=hardware.host_bandwidth_gb * GB,
        nvme_of_node=hardware.nvme_bandwidth_gb * GB,
        price_per_hour=None if price is None else price * hardware.nodes,
        call_seconds=call_seconds,
        is_estimated=is_estimated,
    )


def _assumed_dtype(hardware: HardwareConfig) -> Dtype:
    """Return the dtype that auto selects; assume bf16 on GPUs, which may be on another machine."""
    if hardware.device is Device.cpu:
        return cpu_dtype(hardware.dtype)
    return Dtype.bf16 if hardware.dtype is Dtype.auto else hardware.dtype


def _machine_memory_bytes() -> int:
    """Return the memory in bytes of this machine, or the limit of this container if lower."""
    here = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit = Path("/sys/fs/cgroup/memory.max")
    text = limit.read_text().strip() if limit.exists() else "max"
    return here if text == "max" else min(here, int(text))
