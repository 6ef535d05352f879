"""Threads of torch sleep early while their process waits for cores, and only then."""

import os
import time
from itertools import count
from pathlib import Path

import pytest
import torch

from rlhf.engine import idle_threads
from rlhf.engine.idle_threads import sleep_early_on_shared_cores, waiting_seconds
from tests.runs import python

# CPU seconds of a thread that waits for the next parallel region, without and beside a second team.
IDLE_CPU = """
import ctypes, importlib.util, pathlib, time
from rlhf.engine import idle_threads

torch = pathlib.Path(importlib.util.find_spec("torch").origin).parent
ctypes.CDLL(str(torch / "lib/libgomp.so.1"))
libgomp = idle_threads._find_libgomp()

def cpu_of_idle_thread():
    libgomp.GOMP_parallel(ctypes.cast(ctypes.CDLL(None).free, ctypes.c_void_p), None, 2, 0)
    began = time.process_time()
    time.sleep(0.4)
    return time.process_time() - began

spinning = cpu_of_idle_thread()
freed = idle_threads._keep_sleeping_team(libgomp)
print(spinning, cpu_of_idle_thread())
"""


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core: libgomp never spins long")
def test_an_idle_thread_sleeps_beside_a_second_team(tmp_path: Path) -> None:
    script = tmp_path / "idle_cpu.py"
    script.write_text(IDLE_CPU)
    done = python(script, GOMP_SPINCOUNT="100000000000")
    assert done.returncode == 0, done.stderr
    spinning, sleeping = map(float, done.stdout.split())
    assert sleeping < spinning / 4


def threads_until(wanted: int) -> int:
    """Return this process's number of threads as soon as it is ``wanted``, or after 20 s."""
    end = time.monotonic() + 20
    while (found := len(os.listdir("/proc/self/task"))) != wanted and time.monotonic() < end:
        time.sleep(0.01)
    return found


def test_the_second_team_lives_while_the_process_waits_for_cores(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waited = count(step=1000)  # seconds
    torch.set_num_threads(torch.get_num_threads())  # loads libgomp
    before = len(os.listdir("/proc/self/task"))
    cores = len(os.sched_getaffinity(0))
    monkeypatch.setattr(idle_threads, "PAUSE_S", 0.01)
    monkeypatch.setattr(idle_threads, "waiting_seconds", lambda: 0.0)
    with sleep_early_on_shared_cores():
        assert threads_until(before + 1) == before + 1
        monkeypatch.setattr(idle_threads, "waiting_seconds", lambda: next(waited))
        assert threads_until(before + 1 + cores) == before + 1 + cores
        monkeypatch.setattr(idle_threads, "waiting_seconds", lambda: 0.0)
        assert threads_until(before + 1) == before + 1
        monkeypatch.setattr(idle_threads, "waiting_seconds", lambda: next(waited))
        assert threads_until(before + 1 + cores) == before + 1 + cores
    assert threads_until(before) == before


def test_waiting_is_read_from_all_threads(tmp_path: Path) -> None:
    for thread, text in {"1": "5 2000000000 3\n", "2": "7 500000000 1\n"}.items():
        (tmp_path / thread).mkdir()
        (tmp_path / thread / "schedstat").write_text(text)
    (tmp_path / "3").mkdir()
    (tmp_path / "3/schedstat").symlink_to(tmp_path / "ended")
    assert waiting_seconds(tmp_path) == pytest.approx(2.5)
    assert waiting_seconds(tmp_path / "none") == 0.0
