"""Requests by signals to write a checkpoint, or to stop.

SIGTERM and SIGUSR1 request a checkpoint; SIGTERM also ends the run. The handlers only store the
request; the phase fulfils it after the current step.
"""

from __future__ import annotations

import signal
from types import FrameType


class StoppedError(KeyboardInterrupt):
    """The run was asked to stop; its checkpoints are on the drive."""


class StopRequests:
    """The requests that signals have made: a checkpoint, or a checkpoint and the end of the run."""

    def __init__(self) -> None:
        self.wants_checkpoint = False
        self.wants_stop = False

    def install_handlers(self, *, grace_seconds: int, stops: bool) -> None:
        """Install the signal handlers in this process's main thread.

        SIGUSR1 requests a checkpoint. With ``stops``, SIGTERM requests a checkpoint and a stop:
        StoppedError is raised if the step has not ended after ``grace_seconds``, and a second
        SIGTERM ends the process at once. Without ``stops``, SIGTERM and SIGUSR2 also request only a
        checkpoint, because SLURM ends the process.
        """

        def save(_: int, __: FrameType | None) -> None:
            self.wants_checkpoint = True

        def stop(_: int, __: FrameType | None) -> None:
            self.wants_checkpoint = self.wants_stop = True
            signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a second one ends the process at once
            signal.alarm(grace_seconds)

        def give_up(_: int, __: FrameType | None) -> None:
            raise StoppedError("the step did not end in time")

        signal.signal(signal.SIGUSR1, save)
        signal.signal(signal.SIGTERM, stop if stops else save)
        if stops:
            signal.signal(signal.SIGALRM, give_up)
        else:
            signal.signal(signal.SIGUSR2, save)
