"""Read, write or estimate the rates of this CPU; rlhf/jobs/measure_cpu.py measures them once."""

from __future__ import annotations

import json
import os
import re
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from rlhf.base.atomic import replace_atomically
from rlhf.base.cpu import ONEDNN_MAX_ISA, Isa, cache_folder, num_usable_cores, read_cpu, usable_isa
from rlhf.config.choices import Device, Dtype
from rlhf.config.precision import cpu_dtype
from rlhf.config.schema.hardware import HardwareConfig


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
ESTIMATES = {
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
    bf16, fp32 = ESTIMATES[usable_isa()]
    return CpuRates(
        bf16_tflops=bf16 * num_usable_cores(),
        fp32_tflops=fp32 * num_usable_cores(),
        bandwidth_gb=20.0,
        call_microseconds=4.0,
        is_measured=False,
    )


def store_rates(rates: CpuRates) -> None:
    """Write ``rates`` to the file that ``cpu_rates`` reads; ignore a drive that refuses."""
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
    """Return True if a plan for ``hardware`` needs CPU rates that no idle CPU has measured yet."""
    return (
        hardware.device is Device.cpu
        and None in (configured_cpu_peak(hardware), hardware.memory_bandwidth_gb)
        and (not cpu_rates().is_measured or cpu_rates().was_busy)
    )


def configured_cpu_peak(hardware: HardwareConfig) -> float | None:
    """Return the CPU peak in Tflop/s that ``hardware`` sets for the run's precision, or None."""
    is_fp32 = cpu_dtype(hardware.dtype) is Dtype.fp32
    return hardware.fp32_tflops if is_fp32 else hardware.peak_tflops
