"""Weights & Biases for real: offline into a folder, and online where that cannot work.

Each run is a process of its own with an empty home: wandb reads credentials and settings but once.
"""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

CODE = """
import sys
from pathlib import Path
from rlhf.config.choices import WandbMode
from rlhf.config.schema.run import TrackingConfig
from rlhf.errors import CapabilityError
from rlhf.tracking import wandb_run

wandb_run.INIT_TIMEOUT_SECONDS = 1.0
config = TrackingConfig(
    wandb=WandbMode(sys.argv[1]),
    project="rlhf",
    entity=None,
    tags=["tiny"],
    tensorboard=False,
    log_every=1,
)
try:
    tracker = wandb_run.WandbTracker(
        config,
        Path(sys.argv[2]),
        {"ppo": {"kl_ctl": 0.05}},
        name="monday",
        group="default",
        job_type="sft+ppo",
    )
except CapabilityError as error:
    sys.exit(f"CapabilityError: {error}")
tracker.log("sft", 1, {"sft/loss": 2.5})
tracker.log("ppo", 1, {"ppo/clipfrac": float("nan"), "time/step_seconds": 3.0})
tracker.finish()
"""
KEY = "0123456789abcdef" * 3


class Machine:
    """An empty home, in which trackers are run."""

    def __init__(self, folder: Path) -> None:
        self.home = folder / "home"
        self.run_dir = folder / "run"
        self.home.mkdir()
        self.run_dir.mkdir()

    def track(
        self,
        mode: str,
        *,
        stdin: int = subprocess.DEVNULL,
        stderr: int = subprocess.PIPE,
        **env: str,
    ) -> subprocess.CompletedProcess[str]:
        inherited = {k: v for k, v in os.environ.items() if not k.startswith(("WANDB", "NETRC"))}
        return subprocess.run(
            [sys.executable, "-c", CODE, mode, str(self.run_dir)],
            env=inherited | {"HOME": str(self.home)} | env,
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            timeout=60,  # a prompt would wait for ever
            check=False,
        )

    def records(self) -> list[bytes]:
        """What wandb keeps of each offline run."""
        return [p.read_bytes() for p in self.run_dir.glob("wandb/offline-run-*/run-*.wandb")]


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


@pytest.mark.slow
def test_offline_needs_no_account_and_prints_nothing(machine: Machine) -> None:
    done = machine.track("offline")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    (record,) = machine.records()
    for word in ("sft/loss", "sft/step", "ppo/*", "time/*", "speed/*", "monday", "tiny", "kl_ctl"):
        assert word.encode() in record, word


@pytest.mark.slow
def test_a_resumed_run_keeps_its_id(machine: Machine) -> None:
    machine.track("offline")
    run_id = (machine.run_dir / "wandb_id").read_text().strip()
    machine.track("offline")
    assert (machine.run_dir / "wandb_id").read_text().strip() == run_id
    runs = list(machine.run_dir.glob("wandb/offline-run-*/run-*.wandb"))
    assert {path.name for path in runs} == {f"run-{run_id}.wandb"}


@pytest.mark.slow
def test_the_id_of_a_sweep_agent_goes_first(machine: Machine) -> None:
    (machine.run_dir / "wandb_id").write_text("mine\n")
    machine.track("offline", WANDB_RUN_ID="theirs")
    assert (machine.run_dir / "wandb_id").read_text() == "theirs\n"
    assert list(machine.run_dir.glob("wandb/*/run-theirs.wandb"))


@pytest.mark.slow
def test_the_key_is_written_nowhere(machine: Machine) -> None:
    done = machine.track("offline", WANDB_API_KEY=KEY)
    assert done.returncode == 0
    for path in (*machine.run_dir.rglob("*"), *machine.home.rglob("*")):
        assert not path.is_file() or KEY.encode() not in path.read_bytes(), path


@pytest.mark.slow
def test_online_without_a_key_says_the_ways_out(machine: Machine) -> None:
    done = machine.track("online")
    assert done.returncode == 1
    assert "CapabilityError: tracking.wandb=online: no Weights & Biases credentials" in done.stderr
    for way_out in ("`wandb login`", "WANDB_API_KEY", "tracking=wandb_offline"):
        assert way_out in done.stderr
    assert not (machine.run_dir / "wandb_id").exists()


@pytest.mark.slow
def test_online_without_a_key_does_not_ask_on_a_terminal(machine: Machine) -> None:
    keyboard, terminal = pty.openpty()
    try:
        done = machine.track("online", stdin=terminal, stderr=terminal, TERM="xterm")
        assert done.returncode == 1
        assert b"CapabilityError" in os.read(keyboard, 10_000)
    finally:
        os.close(keyboard)
        os.close(terminal)


@pytest.mark.slow
def test_a_malformed_key_is_refused_in_wandbs_words(machine: Machine) -> None:
    done = machine.track("online", WANDB_API_KEY="short")
    assert done.returncode == 1
    assert "CapabilityError: tracking.wandb=online: Weights & Biases refused" in done.stderr
    assert "40+ characters" in done.stderr


@pytest.mark.slow
def test_a_server_that_does_not_answer_is_an_error_within_seconds(machine: Machine) -> None:
    done = machine.track("online", WANDB_API_KEY=KEY, WANDB_BASE_URL="http://127.0.0.1:9")
    assert done.returncode == 1
    assert "CapabilityError: tracking.wandb=online: Weights & Biases refused" in done.stderr
    assert "tracking=wandb_offline" in done.stderr
    assert KEY not in done.stderr
