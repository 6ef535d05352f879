"""A tracker that kills its process with SIGKILL when a step is logged: KILL_AT=PHASE:STEP."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping

from rlhf.tracking.tracker import Tracker

PATH = "tests.killer:Killer"


class Killer(Tracker):
    """Kills its process before the metrics of a step are on the drive."""

    def __init__(self, *_: object) -> None:
        self._phase, _, self._step = os.environ.get("KILL_AT", "").partition(":")

    def log(self, phase: str, step: int, values: Mapping[str, float]) -> None:
        if phase == self._phase and step == int(self._step):
            os.kill(os.getpid(), signal.SIGKILL)
