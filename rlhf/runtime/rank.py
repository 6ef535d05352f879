"""One of several ranks: it joins the other ranks, runs the worker, and ends together with them."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple

from rlhf.base.command import survive_output_errors
from rlhf.base.errors import INTERRUPTED, LOST_RANK, USER_ERROR, RlhfError
from rlhf.base.safe_text import print_traceback
from rlhf.phases.shared.step_signals import StoppedError
from rlhf.runtime import worker
from rlhf.runtime.out_of_memory import OutOfMemoryError
from rlhf.runtime.rendezvous import Rendezvous, ignores_job_signals

# Seconds that a rank waits after an error: its collective may have failed because of another rank.
CAUSE_S = 3.0


class FailureKind(StrEnum):
    """Reasons for which a rank ends early."""

    refused = "refused"
    """The rank cannot run the configuration; the message is for the user."""
    crashed = "crashed"
    """An exception, whose traceback the rank has printed."""
    out_of_memory = "out_of_memory"
    """The rank needs more memory; the message names keys that help."""
    stuck = "stuck"
    """No step ends; the message names ranks that were stopped, if any."""
    lost = "lost"
    """Another rank has ended."""


class Failure(NamedTuple):
    """The reason for which a rank ends early."""

    kind: FailureKind
    message: str


def write_failure(path: Path, failure: Failure) -> None:
    """Write ``failure`` to ``path``, unless another rank has written a failure there before."""
    unfinished = path.with_suffix(f".{os.getpid()}-{threading.get_ident()}")
    unfinished.write_text(json.dumps(failure))
    with suppress(FileExistsError):
        path.hardlink_to(unfinished)
    unfinished.unlink()


def read_failure(path: Path) -> Failure | None:
    """Return the failure of the first rank that ended; None if no rank wrote a failure."""
    if not path.exists():
        return None
    kind, message = json.loads(path.read_text())
    return Failure(FailureKind(kind), message)


def run_rank(run_dir: Path | None, report_failure: Callable[[Failure], None]) -> None:
    """Run this process as one of several ranks; rank 0 publishes the run directory.

    ``report_failure`` is called once if this rank or another fails; then the process ends.
    """

    def end_after_loss(loss: str) -> None:
        report_failure(Failure(FailureKind.lost, loss))
        sys.stderr.flush()
        os._exit(LOST_RANK)  # not sys.exit: the main thread may wait in a collective for hours

    try:
        rendezvous = Rendezvous(end_after_loss)
        run_dir = rendezvous.agree_on_run_dir(run_dir)
    except RlhfError as error:
        report_failure(Failure(FailureKind.refused, str(error)))
        raise SystemExit(USER_ERROR) from error

    def end_stuck_rank(reason: str) -> None:
        report_failure(Failure(FailureKind.stuck, reason))
        rendezvous.announce_failure(reason)
        sys.stderr.flush()
        os._exit(LOST_RANK)  # not sys.exit: the main thread is stuck

    try:
        worker.run_worker(run_dir, rendezvous, end_stuck_rank)
    except RlhfError as error:
        is_out_of_memory = isinstance(error, OutOfMemoryError)
        kind = FailureKind.out_of_memory if is_out_of_memory else FailureKind.refused
        report_failure(Failure(kind, str(error)))
        rendezvous.announce_failure(str(error))
        raise SystemExit(USER_ERROR) from error
    except StoppedError as error:  # all ranks stop after the same step
        rendezvous.announce_success()
        raise SystemExit(INTERRUPTED) from error
    except Exception as error:
        time.sleep(CAUSE_S)
        print_traceback(type(error), error, error.__traceback__)
        error_line = traceback.format_exception_only(error)[-1].strip()
        report_failure(Failure(FailureKind.crashed, error_line))
        rendezvous.announce_failure(error_line)
        raise SystemExit(1) from error
    rendezvous.announce_success()


def main() -> None:
    """Run a spawned rank with the arguments FAILURE_FILE LAUNCHER [RUN_DIR].

    LAUNCHER is a process id; RUN_DIR is given if this node wrote the run's frozen configuration.
    """
    survive_output_errors()
    failure_file, launcher, *run_dir = sys.argv[1:]
    # Ctrl-C ends a rank at once: if exception handlers ran first, others would report a lost rank.
    # No handler is needed, because files on disk are complete at any moment.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    if ignores_job_signals():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.signal(signal.SIGUSR2, signal.SIG_IGN)

    def report_to_launcher(failure: Failure) -> None:
        if os.getppid() == int(launcher):
            write_failure(Path(failure_file), failure)
        else:  # the launcher was killed: it neither reads nor removes the failure's folder
            shutil.rmtree(Path(failure_file).parent, ignore_errors=True)

    run_rank(Path(run_dir[0]) if run_dir else None, report_to_launcher)


if __name__ == "__main__":
    main()
