"""What a function started ends with its part, in any session and however the run ends."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from rlhf.config.choices import RewardKind
from rlhf.config.schema.rewards import RewardTerm
from rlhf.rewards.isolated import FailureError, IsolatedReward
from rlhf.rewards.rules import Answers
from tests.runs import wait_for

MODULE = """
import os, time

def leaves(prompts, responses):
    "Start a daemon: forked twice, in a session of its own."
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            with open("writing", "w") as file:
                file.write(str(os.getpid()))
            os.rename("writing", "daemon")
            time.sleep(600)
        os._exit(0)
    while not os.path.exists("daemon"):
        time.sleep(0.01)
    if responses[0] == "sleep":
        time.sleep(600)
    if responses[0] == "exit":
        os._exit(3)
    return [1.0]

def returns_twice(prompts, responses):
    "Forget that the child must not return too."
    return [float(os.fork() == 0)]
"""
RUN = """
import sys, time
from tests.rewards.test_supervisor import asked
asked(sys.argv[1])
time.sleep(600)
"""


@pytest.fixture(autouse=True)
def _module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "daemons.py").write_text(MODULE)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    monkeypatch.chdir(tmp_path)


def asked(response: str, function: str = "leaves", seconds: float = 10) -> IsolatedReward:
    """Return a part that has been asked for the score of one response."""
    name = f"daemons:{function}"
    kind = RewardKind.function
    part = IsolatedReward("mine", RewardTerm(kind=kind, function=name, timeout_seconds=seconds))
    part.send_answers(Answers(["?"], [response], [True], [1], {}))
    return part


def daemon() -> Path:
    """Return the folder in /proc of the daemon, once it has been started."""
    wait_for(Path("daemon").exists, seconds=20)
    return Path("/proc", Path("daemon").read_text())


def assert_ended(process: Path) -> None:
    wait_for(lambda: not process.exists(), seconds=10)


def test_a_daemon_ends_with_its_part() -> None:
    part = asked("a")
    assert part.receive_scores().scores == [1]
    left = daemon()
    assert left.exists()
    part.close()
    assert_ended(left)


@pytest.mark.parametrize("response", ["sleep", "exit"])
def test_a_daemon_ends_with_the_process_that_started_it(response: str) -> None:
    part = asked(response, seconds=1)
    with pytest.raises(FailureError):
        part.receive_scores()
    assert_ended(daemon())
    part.close()


@pytest.mark.parametrize("response", ["a", "sleep"])
def test_a_daemon_ends_with_a_run_that_is_killed(response: str) -> None:
    run = subprocess.Popen([sys.executable, "-c", RUN, response])
    try:
        left = daemon()
        assert left.exists()
    finally:
        os.kill(run.pid, signal.SIGKILL)
        run.wait()
    assert_ended(left)


def test_only_one_of_two_processes_that_return_answers() -> None:
    part = asked("a", "returns_twice")
    for _ in range(5):
        assert part.receive_scores().scores == [0]
        part.send_answers(Answers(["?"], ["b"], [True], [1], {}))
    part.close()
