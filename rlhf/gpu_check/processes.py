"""Run each part of a check in its own process, so that a crash or hang does not end the check.

``python -m rlhf.gpu_check.processes NAME FOLDER SIZE`` is the process of the part NAME.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Generator, Iterator
from contextlib import suppress
from importlib import import_module
from pathlib import Path

import torch

from rlhf.base.stored_files import GrowingFile
from rlhf.gpu_check.rows import (
    CheckPart,
    CheckRow,
    RowVerdict,
    Size,
    measure_and_write_rows,
    read_parts,
)
from rlhf.jobs.sweep_jobs import PARENT, end_with_parent

LOG, ROWS = "log.txt", "rows.jsonl"
MODULE = "rlhf.gpu_check.processes"
PAUSE = 0.1  # seconds between two reads of the rows
LEAST_FREE = 8 << 30  # bytes of GPU memory that must be free for models of full size


def run_part(
    part: CheckPart, folder: Path, size: Size, seconds: float, module: str = MODULE
) -> Generator[CheckRow, None, None]:
    """Run ``part`` in a process with a new ``folder``; add each row to ``part.rows``, and yield it.

    A failed row follows if the process crashes, measures nothing or still runs after ``seconds``.
    """
    began = time.monotonic()
    if seconds <= 0:
        reason = "no time was left for this part; `--only` runs it alone"
        yield _add_failed_row(part, f"--minutes, {part.name}", reason, began)
        return
    folder.mkdir()
    file = GrowingFile(folder / ROWS, object)
    with (folder / LOG).open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", module, part.name, str(folder), size],
            env=os.environ | {PARENT: str(os.getpid())},
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # a new process group, so that killpg ends children too
        )
    try:
        while process.poll() is None and time.monotonic() < began + seconds:
            time.sleep(PAUSE)
            yield from _add_new_rows(part, file)
        is_late = process.poll() is None
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        code = process.wait()
    yield from _add_new_rows(part, file)
    if is_late:
        reason = f"not finished after {seconds / 60:.1f} minutes, so it was killed"
    elif code < 0:
        reason = f"ended by {signal.Signals(-code).name}"
    elif code or not part.rows:
        reason = f"exit code {code}" if code else "it measured nothing"
    else:
        return
    yield _add_failed_row(part, "the part's process", f"{reason}; see {folder / LOG}", began)


def _add_new_rows(part: CheckPart, file: GrowingFile) -> Iterator[CheckRow]:
    for value in file.read().values:
        row = CheckRow(**value | {"verdict": RowVerdict(value["verdict"])})
        part.rows.append(row)
        yield row


def _add_failed_row(part: CheckPart, what: str, figure: str, began: float) -> CheckRow:
    failed, took = RowVerdict.failed, time.monotonic() - began
    part.rows.append(CheckRow(what=what, figure=figure, verdict=failed, seconds=took))
    return part.rows[-1]


def main(name: str, folder: Path, size: Size) -> None:
    """Measure all tasks of the part ``name``; use tiny models if little GPU memory is free."""
    end_with_parent()
    if size is Size.full and torch.cuda.mem_get_info()[0] < LEAST_FREE:
        size = Size.tiny
    (module,) = (part.module for part in read_parts() if part.name == name)
    tasks = getattr(import_module(f"rlhf.gpu_check.{module}"), f"check_{name}")
    measure_and_write_rows(folder / ROWS, tasks(folder, size))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), Size(sys.argv[3]))
