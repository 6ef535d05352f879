"""The rates of this machine's CPU: measured once (rlhf/runtime/cpu_rates.py), else estimated."""

from __future__ import annotations

import json
import os
import re
from dataclasses import asdict, dataclass
from pathlib import Path

from rlhf.config.choices import Device, Dtype
from rlhf.config.machine_schema import HardwareConfig
from rlhf.config.precision import cpu_dtype
from rlhf.cpu import ONEDNN_MAX_ISA, Isa, cache_folder, cores, read_cpu, usable_isa


@dataclass(frozen=True, kw_only=True)
class CpuRates:
    """What all cores that this process may use do together."""

    bf16_tflops: float
    """Products of large matrices; 0 if bf16 is not native and was not measured."""
    fp32_tflops: float
    bandwidth_gb: float
    """Gigabytes per second (1e9) read from memory."""
    call_microseconds: float
    """One call of a small torch operation."""
    is_measured: bool = True
    was_busy: bool = False
    """Something else used the machine while it was measured; the next run measures again."""


# Of one core: Tflop/s in bf16 and fp32. Measured on a Xeon with AMX and an EPYC with AVX512-BF16,
# and guessed for older ones.
ESTIMATES = {
    Isa.amx: (0.8, 0.17),
    Isa.avx512_bf16: (0.4, 0.1),
    Isa.avx2: (0.0, 0.05),
    Isa.none: (0.0, 0.02),
}


def cpu_rates() -> CpuRates:
    """Return the rates that were measured on this machine, or else typical ones."""
    try:
        return CpuRates(**json.loads(rates_file().read_text()))
    except (OSError, ValueError, TypeError):  # there is none, or another version wrote it
        return typical_rates()


def typical_rates() -> CpuRates:
    """Return the rates of a CPU with the instruction set and the cores of this one."""
    bf16, fp32 = ESTIMATES[usable_isa()]
    return CpuRates(
        bf16_tflops=bf16 * cores(),
        fp32_tflops=fp32 * cores(),
        bandwidth_gb=20.0,
        call_microseconds=4.0,
        is_measured=False,
    )


def keep_rates(rates: CpuRates) -> None:
    """Write ``rates`` where ``cpu_rates`` finds them; without a writable cache nothing is kept."""
    path = rates_file()
    unfinished = path.with_suffix(f".{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished.write_text(json.dumps(asdict(rates), indent=1))
        unfinished.replace(path)
    except OSError:
        unfinished.unlink(missing_ok=True)


def rates_file() -> Path:
    """Return the file of this CPU, with these cores and caps."""
    caps = [usable_isa().name, os.environ.get(ONEDNN_MAX_ISA, "")]
    words = [read_cpu().name, f"{cores()} cores", *filter(None, caps)]
    return cache_folder() / f"rates-{re.sub('[^a-zA-Z0-9]+', '-', ' '.join(words))}.json"


def lacks_rates(hardware: HardwareConfig) -> bool:
    """Return True if a plan for ``hardware`` has to estimate this CPU's rates."""
    return (
        hardware.device is Device.cpu
        and None in (peak_of(hardware), hardware.memory_bandwidth_gb)
        and (not cpu_rates().is_measured or cpu_rates().was_busy)
    )


def peak_of(hardware: HardwareConfig) -> float | None:
    """Return the Tflop/s that ``hardware`` names for a CPU in the precision of the run, if any."""
    is_fp32 = cpu_dtype(hardware.dtype) is Dtype.fp32
    return hardware.fp32_tflops if is_fp32 else hardware.peak_tflops
