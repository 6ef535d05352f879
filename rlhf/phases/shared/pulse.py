"""Signs of life of a phase in progress, which the watchdog looks for."""

from __future__ import annotations

import time


class Pulse:
    """The time of the last sign of life; outside the steps of a phase none is expected."""

    def __init__(self) -> None:
        self._last: float | None = None

    def start(self) -> None:
        """Give a sign of life, and expect more from now on: a step begins."""
        self._last = time.monotonic()

    def beat(self) -> None:
        """Give a sign of life, if any are expected: a batch of an evaluation begins."""
        if self._last is not None:
            self._last = time.monotonic()

    def stop(self) -> None:
        """Expect no more signs of life: the last step has ended."""
        self._last = None

    @property
    def silence(self) -> float:
        """Return the seconds since the last sign of life; 0 while none is expected."""
        last = self._last
        return 0.0 if last is None else time.monotonic() - last
