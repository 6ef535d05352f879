"""Let idle threads of torch sleep early while other programs use this run's cores.

An idle thread of libgomp, torch's OpenMP, spins GOMP_SPINCOUNT times before it sleeps. On free
cores spinning saves the time to wake the thread. On shared cores a thread also spins until the
scheduler resumes the threads for which it waits, and a step takes several times as long.

libgomp reads GOMP_SPINCOUNT only once, but a thread spins at most 100 times while the process has
more OpenMP threads than cores (https://gcc.gnu.org/onlinedocs/libgomp/GOMP_005fSPINCOUNT.html).
``sleep_early_on_shared_cores`` therefore keeps a second team of threads, all asleep, while the
process waits for cores. The threads that compute stay the same, and so does every result.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Event, Thread

PAUSE_S = 0.25  # seconds between two looks at the cores
# Seconds that all threads together wait for a core, per second. Above SHARED, other programs
# use the cores too; below FREE, which is lower as threads that sleep early wait less, none do.
SHARED, FREE = 0.2, 0.05


@contextmanager
def sleep_early_on_shared_cores() -> Iterator[None]:
    """Watch the cores until the context ends; do nothing if no libgomp is loaded."""
    libgomp, over = _find_libgomp(), Event()
    if libgomp is None:
        yield
        return
    watcher = Thread(target=_watch_cores, args=(libgomp, over), daemon=True)
    watcher.start()
    try:
        yield
    finally:
        over.set()
        watcher.join()


def _watch_cores(libgomp: ctypes.CDLL, over: Event) -> None:
    """Until ``over`` is set, keep the sleeping team while this process's threads lack cores."""
    freed: Event | None = None  # ends the sleeping team; None if there is no team
    waited, began = waiting_seconds(), time.monotonic()
    while not over.wait(PAUSE_S):
        now, end = waiting_seconds(), time.monotonic()
        wait_rate = (now - waited) / (end - began)
        waited, began = now, end
        if freed is None and wait_rate > SHARED:
            freed = _keep_sleeping_team(libgomp)
        elif freed is not None and wait_rate < FREE:
            freed.set()
            freed = None
    if freed is not None:
        freed.set()


def _keep_sleeping_team(libgomp: ctypes.CDLL) -> Event:
    """Start a team of as many threads as there are cores; return the event that ends its threads.

    libgomp keeps a team's threads, asleep, until the thread that started the team ends.
    """
    freed, started = Event(), Event()
    does_nothing = ctypes.cast(ctypes.CDLL(None).free, ctypes.c_void_p)  # with the argument NULL
    cores = len(os.sched_getaffinity(0))

    def hold_team() -> None:
        libgomp.GOMP_parallel(does_nothing, None, ctypes.c_uint(cores), ctypes.c_uint(0))
        started.set()
        freed.wait()

    Thread(target=hold_team, daemon=True).start()
    started.wait()
    return freed


def waiting_seconds(tasks: Path = Path("/proc/self/task")) -> float:
    """Return the seconds for which the threads of this process were ready and had no core.

    The second number of Linux' file ``schedstat`` has them; without the file they are 0.
    """
    waited = 0
    for file in tasks.glob("*/schedstat"):
        with suppress(OSError):  # the thread has ended
            waited += int(file.read_text().split()[1])
    return waited / 1e9


def _find_libgomp(maps: Path = Path("/proc/self/maps")) -> ctypes.CDLL | None:
    """Return the loaded libgomp, torch's if there are several; None if none is loaded.

    Other packages may have loaded copies too; torch's copy is in torch's folder.
    """
    lines = [line for line in maps.read_text().splitlines() if "libgomp" in line]
    paths = {line.split(maxsplit=5)[5] for line in lines}
    sorted_paths = sorted(paths, key=lambda path: "/torch/" in path)
    return ctypes.CDLL(sorted_paths[-1]) if sorted_paths else None
