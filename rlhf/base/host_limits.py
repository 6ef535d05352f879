"""Limits of this process on memory and cores: control groups (containers, SLURM), and shares."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

GROUPS_OF_PROCESS = Path("/proc/self/cgroup")
GROUPS = Path("/sys/fs/cgroup")
MEMORY_FILES = ("memory.max", "memory.limit_in_bytes")  # of versions 2 and 1
SHARED_BY = "RLHF_JOBS_ON_MACHINE"


class HostLimits(NamedTuple):
    """The lowest limits of a process's control groups; None: no limit."""

    memory: int | None
    cores: float | None


def jobs_on_machine() -> int:
    """Return how many jobs of a sweep or search share this machine's memory."""
    return int(os.environ.get(SHARED_BY, "1"))


def read_limits(of_process: Path = GROUPS_OF_PROCESS, groups: Path = GROUPS) -> HostLimits:
    """Return the limits of a process whose control groups the file ``of_process`` names.

    A limit of an outer group holds too. In a container the names may be those of the host: then
    only the outermost folder of ``groups`` exists.
    """
    folders = [*_folders(of_process, groups)]
    memory = [n for f in folders for name in MEMORY_FILES for n in _numbers(f / name)]
    quotas = [_numbers(folder / "cpu.max") for folder in folders]
    quotas += [
        [n for end in ("quota", "period") for n in _numbers(folder / f"cpu.cfs_{end}_us")]
        for folder in folders
    ]
    cores = [pair[0] / pair[1] for pair in quotas if len(pair) == 2 and pair[0] > 0]  # noqa: PLR2004
    return HostLimits(min(memory, default=None), min(cores, default=None))


def _folders(of_process: Path, groups: Path) -> Iterator[Path]:
    """Yield the folder of each control group of the process, and of the groups around it."""
    try:
        lines = of_process.read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        _, controllers, name = line.split(":", 2)
        top = groups / controllers
        parts = [part for part in Path(name).parts if part not in {"/", ".."}]
        for end in range(len(parts), -1, -1):
            yield top.joinpath(*parts[:end])


def _numbers(path: Path) -> list[int]:
    """Return the numbers in a file of a control group; [] without the file or a limit (max)."""
    try:
        words = path.read_text().split()
    except OSError:
        return []
    return [int(word) for word in words] if "max" not in words else []


def available_bytes(meminfo: Path = Path("/proc/meminfo")) -> int:
    """Return the memory that this process can get: free memory, and caches that Linux can drop."""
    (line,) = (x for x in meminfo.read_text().splitlines() if x.startswith("MemAvailable:"))
    available, limit = 1024 * int(line.split()[1]), read_limits().memory
    return available if limit is None else min(available, limit)
