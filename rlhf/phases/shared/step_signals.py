"""Handlers of the signals that request a checkpoint, or a checkpoint and the run's end.

SIGUSR1 requests a checkpoint. SIGTERM requests a checkpoint and, outside of SLURM jobs, the end of
the run. The handlers store the request, which the phase fulfils after the current step.
"""

from __future__ import annotations

import signal
from types import FrameType


class StoppedError(KeyboardInterrupt):
    """The error that ends a run after a signal or checkpoint.stop_after; checkpoints are kept."""


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

        def request_checkpoint(_: int, __: FrameType | None) -> None:
            self.wants_checkpoint = True

        def request_stop(_: int, __: FrameType | None) -> None:
            self.wants_checkpoint = self.wants_stop = True
            signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a second SIGTERM ends the process
            signal.alarm(grace_seconds)

        def raise_stopped_error(_: int, __: FrameType | None) -> None:
            raise StoppedError("the step did not end in time")

        signal.signal(signal.SIGUSR1, request_checkpoint)
        signal.signal(signal.SIGTERM, request_stop if stops else request_checkpoint)
        if stops:
            signal.signal(signal.SIGALRM, raise_stopped_error)
        else:
            signal.signal(signal.SIGUSR2, request_checkpoint)
