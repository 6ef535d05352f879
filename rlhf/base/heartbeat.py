"""Heartbeats of this process; if they stop, rlhf/runtime/watchdog.py ends the run."""

from __future__ import annotations

import time
from typing import ClassVar


class Heartbeat:
    """The time of the last heartbeat; the watchdog expects heartbeats only during a phase."""

    current: ClassVar[Heartbeat | None] = None  # the one that was started last

    def __init__(self) -> None:
        self._last: float | None = None

    def start(self) -> None:
        """Record a heartbeat, and expect more until ``stop``; call this when a step begins."""
        Heartbeat.current, self._last = self, time.monotonic()

    def beat(self) -> None:
        """Record a heartbeat if more are expected."""
        if self._last is not None:
            self._last = time.monotonic()

    def stop(self) -> None:
        """Expect no more heartbeats; call this when the last step has ended."""
        self._last = None

    @property
    def seconds_since_beat(self) -> float:
        """Return the seconds since the last heartbeat; 0 while none is expected."""
        last = self._last
        return 0.0 if last is None else time.monotonic() - last


def beat() -> None:
    """Record a heartbeat; call this once per decoded token, micro-batch or saved tensor."""
    if Heartbeat.current is not None:
        Heartbeat.current.beat()
