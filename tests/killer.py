"""Trackers that disturb a run: the first kills it when KILL_AT=PHASE:STEP is logged."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path

from rlhf.tracking.tracker import Tracker

PATH = "tests.killer:Killer"


class Killer(Tracker):
    """Kills its process before the metrics of a step are on the drive."""

    def __init__(self, *_: object) -> None:
        self._phase, _, self._step = os.environ.get("KILL_AT", "").partition(":")

    def log(self, phase: str, step: int, values: Mapping[str, float]) -> None:
        if phase == self._phase and step == int(self._step):
            os.kill(os.getpid(), signal.SIGKILL)


class Sleeper(Tracker):
    """Sleeps in the first step, as if the step did not end."""

    def __init__(self, _: object, run_dir: Path) -> None:
        self._run_dir = run_dir

    def log(self, phase: str, step: int, values: Mapping[str, float]) -> None:
        if step == 1:
            (self._run_dir / "asleep").touch()
            time.sleep(300)
