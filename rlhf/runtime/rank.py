"""One of several ranks: it joins the others, runs the worker, and ends together with them."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple

from rlhf.errors import RlhfError
from rlhf.runtime import worker
from rlhf.runtime.distributed import Meeting, ignores_job_signals

USER_ERROR = 2
LOST_ANOTHER = 1  # exit code of a rank that ends because another has


class Kind(StrEnum):
    """What can end a rank before its time."""

    refused = "refused"
    """It cannot do what was asked, and says why."""
    crashed = "crashed"
    """An error, whose traceback it has printed."""
    lost = "lost"
    """Another rank has ended."""


class Failure(NamedTuple):
    """Why a rank ends before its time."""

    kind: Kind
    message: str


def write_failure(path: Path, failure: Failure) -> None:
    """Keep why a rank ends; what was first stays."""
    unfinished = path.with_suffix(f".{os.getpid()}-{threading.get_ident()}")
    unfinished.write_text(json.dumps(failure))
    with suppress(FileExistsError):
        path.hardlink_to(unfinished)
    unfinished.unlink()


def read_failure(path: Path) -> Failure | None:
    """Why the first rank ended; None when none could say."""
    if not path.exists():
        return None
    kind, message = json.loads(path.read_text())
    return Failure(Kind(kind), message)


def be_rank(run_dir: Path | None, tell: Callable[[Failure], None]) -> None:
    """Be one of several started ranks, of the run that rank 0 knows the directory of.

    ``tell`` is called once if this rank or another fails; then the process ends.
    """

    def follow(loss: str) -> None:
        tell(Failure(Kind.lost, loss))
        sys.stderr.flush()
        os._exit(LOST_ANOTHER)  # the main thread may wait in a collective, for hours

    try:
        meeting = Meeting(follow)
        run_dir = meeting.agree(run_dir)
    except RlhfError as error:
        tell(Failure(Kind.refused, str(error)))
        raise SystemExit(USER_ERROR) from error
    try:
        worker.run(run_dir, meeting)
    except RlhfError as error:
        tell(Failure(Kind.refused, str(error)))
        meeting.fail(str(error))
        raise SystemExit(USER_ERROR) from error
    except Exception as error:
        meeting.await_cause()
        traceback.print_exc()
        what = traceback.format_exception_only(error)[-1].strip()
        tell(Failure(Kind.crashed, what))
        meeting.fail(what)
        raise SystemExit(1) from error
    meeting.done()


def main() -> None:
    """Be one spawned rank: FAILURE_FILE [RUN_DIR], the latter where the run was frozen here."""
    failure_file, *run_dir = map(Path, sys.argv[1:])
    # Ctrl-C ends a rank at once, whatever it waits for: unwinding would let the other ranks notice
    # first and complain. What is on disk is whole at any moment.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    if ignores_job_signals():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    be_rank(run_dir[0] if run_dir else None, lambda failure: write_failure(failure_file, failure))


if __name__ == "__main__":
    main()
