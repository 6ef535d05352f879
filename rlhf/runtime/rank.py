"""One of several ranks: it joins the other ranks, runs the worker, and ends together with them."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from enum import StrEnum
from pathlib import Path
from typing import Any, NamedTuple

from rlhf.base.atomic import replace_atomically
from rlhf.base.command import survive_output_errors
from rlhf.base.errors import INTERRUPTED, LOST_RANK, USER_ERROR, RlhfError
from rlhf.base.foreign_errors import convert_drive_errors
from rlhf.base.safe_text import print_traceback
from rlhf.phases.shared.step_signals import StoppedError
from rlhf.runtime import worker
from rlhf.runtime.out_of_memory import OutOfMemoryError
from rlhf.runtime.rank_output import describe_rank, redirect_output
from rlhf.runtime.rendezvous import Rendezvous, ignores_job_signals

# Seconds that a rank waits after an error: its collective may have failed because of another rank.
CAUSE_S = 3.0


class FailureKind(StrEnum):
    """Reasons for which a rank ends early."""

    refused = "refused"  # the rank cannot run the configuration; the message is for the user
    crashed = "crashed"  # an exception with a printed traceback; the message names the rank
    out_of_memory = "out_of_memory"  # the rank needs more memory; the message names keys that help
    stuck = "stuck"  # no step ends; the message names ranks that were stopped, if any
    lost = "lost"  # another rank has ended


class Failure(NamedTuple):
    """The reason for which a rank ends early."""

    kind: FailureKind
    message: str


def report_to_agent(failure: Failure) -> None:
    """Report the first failure of this rank to torchrun's agent, whose output ends with it."""
    file = Path(os.environ.get("TORCHELASTIC_ERROR_FILE", os.devnull))
    if not file.exists():
        report = failure._asdict() | {"extraInfo": {"timestamp": time.time()}}
        with replace_atomically(file, shared=True) as building:
            building.write_text(json.dumps({"message": report}))


def find_first_failure(ends: Iterable[Any]) -> Failure | None:
    """Return the failure that was reported first to the agent; ``ends`` are its ProcessFailures."""
    messages = (end.error_file_data["message"] for end in ends)
    reports = [each for each in messages if isinstance(each, dict)]
    first = min(reports, key=lambda each: each["extraInfo"]["timestamp"], default=None)
    return None if first is None else Failure(FailureKind(first["kind"]), first["message"])


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
        with convert_drive_errors():
            if rendezvous.rank > 0:
                redirect_output(run_dir, rendezvous.rank)
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
        name = describe_rank(rendezvous.rank, run_dir)
        report_failure(Failure(FailureKind.crashed, f"{name} failed: {error_line}"))
        rendezvous.announce_failure(error_line)
        raise SystemExit(1) from error
    rendezvous.announce_success()


def main() -> None:
    """Run a spawned rank with the arguments FOLDER LAUNCHER [RUN_DIR].

    FOLDER is the agent's, LAUNCHER its process id; RUN_DIR is given if this node wrote the run's
    frozen configuration.
    """
    survive_output_errors()
    folder, launcher, *run_dir = sys.argv[1:]
    # Ctrl-C ends a rank at once: if exception handlers ran first, others would report a lost rank.
    # No handler is needed, because files on disk are complete at any moment.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    if ignores_job_signals():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.signal(signal.SIGUSR2, signal.SIG_IGN)

    def report_to_launcher(failure: Failure) -> None:
        if os.getppid() == int(launcher):
            report_to_agent(failure)
        else:  # the launcher was killed: it does not remove the agent's folder
            shutil.rmtree(folder, ignore_errors=True)

    run_rank(Path(run_dir[0]) if run_dir else None, report_to_launcher)


if __name__ == "__main__":
    main()
