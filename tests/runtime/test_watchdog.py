"""A run that hangs is ended, with the stacks of its ranks and the name of one that is stopped."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rlhf.base.heartbeat import Heartbeat
from rlhf.runtime.watchdog import Process
from tests.runs import ROOT, children, wait_for
from tests.runtime.test_resume import is_there, start_run


def test_nothing_is_expected_outside_the_steps() -> None:
    heartbeat = Heartbeat()
    heartbeat.beat()
    time.sleep(0.02)
    assert heartbeat.seconds_since_beat == 0
    heartbeat.start()
    time.sleep(0.02)
    assert heartbeat.seconds_since_beat >= 0.02
    heartbeat.beat()
    assert heartbeat.seconds_since_beat < 0.02
    heartbeat.stop()
    assert heartbeat.seconds_since_beat == 0


def test_a_stopped_process_is_known() -> None:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    there = Process(socket.gethostname(), process.pid)
    assert not there.is_suspended
    process.send_signal(signal.SIGSTOP)
    wait_for(lambda: there.is_suspended, seconds=10)
    assert not there._replace(host="elsewhere").is_suspended
    process.kill()
    process.wait()
    assert not there.is_suspended


@pytest.mark.slow
def test_a_stopped_rank_is_named_with_its_stack(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    endless = ["phase=sft", "sft.epochs=9999", "hardware.ranks_per_node=2"]
    more = [*endless, "launcher.watchdog_minutes=0.05"]
    process = start_run(run_dir, *more)
    started = children(process.pid)
    os.kill(started[-1], signal.SIGSTOP)  # the last one
    began = time.monotonic()
    _, complaint = process.communicate(timeout=60)
    assert time.monotonic() - began < 3 + 15
    assert process.returncode == 2
    stopped = f"rank 1 on {socket.gethostname()} was stopped (SIGSTOP)"
    told = "error: no part of a step has ended for 3 seconds (launcher.watchdog_minutes): "
    assert f"{told}{stopped}; rlhf resume={run_dir} continues the run" in complaint
    assert "rlhf/phases/sft.py" in (run_dir / "logs" / "rank_1.txt").read_text()
    assert "rank 0 waits; its stacks:" in complaint
    assert "rank 1 was stopped; its stacks:" in complaint
    wait_for(lambda: not any(map(is_there, started)), seconds=10)


@pytest.mark.slow
def test_a_single_rank_that_hangs_ends_with_its_stack(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    slow = ["tracking.others=[tests.killer:Sleeper]", "launcher.watchdog_minutes=0.03"]
    process = start_run(run_dir, "phase=sft", *slow, file="asleep", PYTHONPATH=ROOT)
    _, complaint = process.communicate(timeout=60)
    assert process.returncode == 2
    assert "tests/killer.py" in complaint
    told = "no part of a step has ended for 1.8 seconds (launcher.watchdog_minutes): see the st"
    assert told in complaint
