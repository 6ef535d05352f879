"""An environment that takes its time; ``episodes.py`` measures rollouts with it."""

from __future__ import annotations

import time
from typing import Any

from rlhf.options.environments.interface import Step


class Waiting:
    """Answers every turn after a pause, and never ends."""

    def __init__(self, ms: float) -> None:
        self._seconds = ms / 1e3

    def reset(self, *, seed: int, row: dict[str, Any]) -> str:  # noqa: ARG002 - always the same
        """Begin an episode."""
        return "go"

    def step(self, text: str) -> Step:  # noqa: ARG002 - whatever it says
        """Answer a turn."""
        time.sleep(self._seconds)
        return Step("on")
