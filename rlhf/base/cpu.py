"""Read this machine's CPU: name, cores and instruction sets, and limits on cores and memory.

The planner, the engine and the kernels call these functions; nothing here imports torch.
"""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Iterator
from enum import IntEnum
from functools import cache
from pathlib import Path
from typing import NamedTuple

from rlhf.base.errors import CapabilityError, ConfigError
from rlhf.base.user_paths import expand_user_path

CPUINFO = Path("/proc/cpuinfo")
MAX_ISA = "RLHF_MAX_CPU_ISA"


class Isa(IntEnum):
    """Levels of instruction sets that this project has code for; each includes the lower levels."""

    none = 0  # no code of this project; torch only
    avx2 = 1  # AVX2 with FMA; on ARM, NEON
    avx512_bf16 = 2  # AVX-512 with products of bf16 numbers
    amx = 3  # products of bf16 matrices


# The flags in /proc/cpuinfo that each level adds to the level before it.
FLAGS = {
    Isa.avx2: {"avx2", "fma"},
    Isa.avx512_bf16: {"avx512f", "avx512bw", "avx512vl", "avx512_bf16"},
    Isa.amx: {"amx_tile", "amx_bf16"},
}
# The environment variable that caps oneDNN's instruction set, and the level that each value allows;
# a value that is not listed here allows every level.
# https://uxlfoundation.github.io/oneDNN/dev_guide_cpu_dispatcher_control.html
ONEDNN_MAX_ISA = "ONEDNN_MAX_CPU_ISA"
ONEDNN_LEVELS = {
    "SSE41": Isa.none,
    "AVX": Isa.none,
    "AVX2": Isa.avx2,
    "AVX2_VNNI": Isa.avx2,
    "AVX2_VNNI_2": Isa.avx2,
    "AVX512_CORE": Isa.avx2,
    "AVX512_CORE_VNNI": Isa.avx2,
    "AVX512_CORE_BF16": Isa.avx512_bf16,
    "AVX512_CORE_FP16": Isa.avx512_bf16,
}
ONEDNN_NAMES = {Isa.none: "SSE41", Isa.avx2: "AVX2", Isa.avx512_bf16: "AVX512_CORE_BF16"}


class Cpu(NamedTuple):
    """The name and the feature flags of a CPU, read from /proc/cpuinfo."""

    name: str
    """Model name, and the numbers that distinguish CPUs with the same name."""
    flags: frozenset[str]

    @property
    def isa(self) -> Isa:
        """Return the highest level that the CPU supports; a level requires all lower levels."""
        if "asimd" in self.flags:
            return Isa.avx2
        highest = Isa.none
        for level, flags in FLAGS.items():
            if not flags <= self.flags:
                break
            highest = level
        return highest


@cache
def read_cpu(cpuinfo: Path = CPUINFO) -> Cpu:
    """Return the CPU that ``cpuinfo`` describes; if there is no such file, a CPU without flags."""
    if not cpuinfo.exists():
        return Cpu(platform.processor() or platform.machine(), frozenset())
    first_core, _, _ = cpuinfo.read_text().partition("\n\n")
    fields = dict(line.partition(":")[::2] for line in first_core.splitlines())
    values = {key.strip(): value.strip() for key, value in fields.items()}
    numbers = [values.get(key, "") for key in ("cpu family", "model", "stepping", "CPU part")]
    name = values.get("model name", f"{platform.machine()} {values.get('CPU implementer', '')}")
    flags = values.get("flags") or values.get("Features") or ""
    return Cpu(f"{name.strip()} ({'-'.join(filter(None, numbers))})", frozenset(flags.split()))


def usable_isa(cpu: Cpu | None = None) -> Isa:
    """Return the level that our kernels may use: the CPU's, or RLHF_MAX_CPU_ISA if it is lower.

    Raises:
        ConfigError: if RLHF_MAX_CPU_ISA is set to anything but the name of a level.
    """
    cap = os.environ.get(MAX_ISA, "")
    if cap and cap not in Isa.__members__:
        raise ConfigError(f"{MAX_ISA}={cap}: must be one of {', '.join(Isa.__members__)}, or unset")
    return min((cpu or read_cpu()).isa, Isa[cap] if cap else max(Isa))


def require_linux() -> None:
    """Raise a CapabilityError unless this system is Linux."""
    if sys.platform != "linux":
        raise CapabilityError(
            f"this program runs on Linux only, and this system is {sys.platform}; "
            "use a Linux machine, a container or WSL 2"
        )


def cap_onednn_isa() -> None:
    """Cap oneDNN, torch's matrix library, at RLHF_MAX_CPU_ISA; call it before torch is imported."""
    if os.environ.get(MAX_ISA) and usable_isa() in ONEDNN_NAMES:
        os.environ.setdefault(ONEDNN_MAX_ISA, ONEDNN_NAMES[usable_isa()])


def multiplies_bf16(cpu: Cpu | None = None) -> bool:
    """Return True if the CPU multiplies bf16 numbers natively, which is faster than fp32.

    On x86 this requires AVX512-BF16 or AMX, which oneDNN must be allowed to use; on ARM, the flag
    bf16.
    """
    cpu = cpu or read_cpu()
    if "asimd" in cpu.flags:
        return "bf16" in cpu.flags
    return onednn_isa(cpu) >= Isa.avx512_bf16


def onednn_isa(cpu: Cpu | None = None) -> Isa:
    """Return the level that oneDNN may use: ``usable_isa``, or ONEDNN_MAX_CPU_ISA if lower."""
    cap = ONEDNN_LEVELS.get(os.environ.get(ONEDNN_MAX_ISA, "").upper(), max(Isa))
    return min(usable_isa(cpu), cap)


def has_slow_mkl(cpu: Cpu | None = None) -> bool:
    """Return True if oneDNN multiplies fp32 matrices faster than MKL, which torch uses otherwise.

    On AMD's CPUs, MKL runs only AVX2 code even if the CPU has AVX-512.
    """
    cpu = cpu or read_cpu()
    return cpu.name.startswith("AMD") and onednn_isa(cpu) >= Isa.avx2


def can_train_fp16(cpu: Cpu | None = None) -> bool:
    """Return True if DeepSpeed can train in fp16 on this CPU: oneDNN must support fp16 there."""
    cpu = cpu or read_cpu()
    allowed = os.environ.get(ONEDNN_MAX_ISA, "").upper()
    has_fp16 = {"avx512_fp16", "amx_fp16", "avx_ne_convert", "asimdhp"} & cpu.flags
    return bool(has_fp16) and allowed not in ONEDNN_LEVELS.keys() - {"AVX512_CORE_FP16"}


def cache_folder() -> Path:
    """Return the folder that caches compiled kernels, CPU rates, finished phases and more."""
    return expand_user_path(os.environ.get("RLHF_CACHE") or "~/.cache/rlhf", key="RLHF_CACHE")


def num_usable_cores() -> int:
    """Return the number of cores that this process may use; a container's quota is rounded down."""
    cores, quota = len(os.sched_getaffinity(0)), read_cgroup_limits().cores
    return cores if quota is None else max(1, min(cores, int(quota)))


CGROUP_LIST = Path("/proc/self/cgroup")
CGROUP_ROOT = Path("/sys/fs/cgroup")
MEMORY_FILES = ("memory.max", "memory.limit_in_bytes")  # in cgroups of version 2 and of version 1
JOBS_ENV = "RLHF_JOBS_ON_MACHINE"  # environment variable: number of concurrent jobs


class HostLimits(NamedTuple):
    """The memory and the CPU cores to which cgroups limit a process; None: no limit."""

    memory: int | None  # bytes
    cores: float | None


def num_jobs_on_machine() -> int:
    """Return the number of jobs of a sweep or search that run on this machine together."""
    return int(os.environ.get(JOBS_ENV, "1"))


def read_cgroup_limits(cgroup_list: Path = CGROUP_LIST, root: Path = CGROUP_ROOT) -> HostLimits:
    """Return the lowest limits of the cgroups that the file ``cgroup_list`` lists for a process.

    The limits of enclosing cgroups apply too. In a container the file may list paths that exist
    only on the host: then only the outermost folder of each hierarchy has limits to read.
    """
    folders = [*_cgroup_folders(cgroup_list, root)]
    memory = [n for f in folders for name in MEMORY_FILES for n in _read_cgroup_numbers(f / name)]
    quotas = [_read_cgroup_numbers(folder / "cpu.max") for folder in folders]
    quotas += [
        [n for end in ("quota", "period") for n in _read_cgroup_numbers(each / f"cpu.cfs_{end}_us")]
        for each in folders
    ]
    cores = [pair[0] / pair[1] for pair in quotas if len(pair) == 2 and pair[0] > 0]  # noqa: PLR2004
    return HostLimits(min(memory, default=None), min(cores, default=None))


def _cgroup_folders(cgroup_list: Path, root: Path) -> Iterator[Path]:
    """Yield the folders of the process's cgroups, and of the cgroups that enclose them."""
    try:
        lines = cgroup_list.read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        _, controllers, name = line.split(":", 2)
        top = root / controllers
        parts = [part for part in Path(name).parts if part not in {"/", ".."}]
        for end in range(len(parts), -1, -1):
            yield top.joinpath(*parts[:end])


def _read_cgroup_numbers(path: Path) -> list[int]:
    """Return the numbers in a file of a cgroup; [] if there is no file or no limit ("max")."""
    try:
        words = path.read_text().split()
    except OSError:
        return []
    return [int(word) for word in words] if "max" not in words else []


def available_memory_bytes(meminfo: Path = Path("/proc/meminfo")) -> int:
    """Return the bytes that Linux can make available, or the cgroup's limit if it is lower."""
    (line,) = (x for x in meminfo.read_text().splitlines() if x.startswith("MemAvailable:"))
    available, limit = 1024 * int(line.split()[1]), read_cgroup_limits().memory
    return available if limit is None else min(available, limit)
