"""Run each part of a check in its own process, so that a crash or hang does not end the check.

``python -m rlhf.gpu_check.processes NAME FOLDER SIZE`` is the process of the part NAME.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path

import torch

from rlhf.base.packaged_yaml import read_yaml_beside
from rlhf.base.stored_files import GrowingFile
from rlhf.gpu_check.rows import (
    CheckPart,
    CheckRow,
    CheckSetting,
    RowVerdict,
    Size,
    measure_and_write_rows,
)
from rlhf.jobs.sweep_jobs import PARENT, end_with_parent

LOG, ROWS = "log.txt", "rows.jsonl"
MODULE = "rlhf.gpu_check.processes"
PAUSE = 0.1  # seconds between two reads of the rows
LEAST_FREE = 8 << 30  # bytes of GPU memory that must be free for models of full size
# The parts, in the order in which they run.
PARTS = [
    CheckPart(**{"name": name, "module": name} | part)
    for name, part in read_yaml_beside(__file__, "parts.yaml").items()
]
BY_NAME = {part.name: part for part in PARTS}


def run_part(
    part: CheckPart,
    folder: Path,
    size: Size,
    seconds: float,
    show: Callable[[CheckRow], None],
    module: str = MODULE,
) -> Sequence[CheckRow]:
    """Run ``part`` in a new ``folder``; pass each row to ``show`` when it appears; return all rows.

    If the process crashes, or still runs after ``seconds``, a failed row with the reason follows.
    """
    shown: list[CheckRow] = []
    file, began = GrowingFile(folder / ROWS, object), time.monotonic()

    def show_row(row: CheckRow) -> None:
        shown.append(row)
        show(row)

    def show_new_rows() -> None:
        for value in file.read().values:
            show_row(CheckRow(**value | {"verdict": RowVerdict(value["verdict"])}))

    def show_failure(figure: str, what: str) -> None:
        failed, took = RowVerdict.failed, time.monotonic() - began
        show_row(CheckRow(what=what, figure=figure, verdict=failed, seconds=took))

    if seconds <= 0:
        show_failure("no time was left for it; `--only` runs it alone", f"--minutes, {part.name}")
        return shown
    folder.mkdir()
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
                show_new_rows()
            is_late = process.poll() is None
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    show_new_rows()
    if (why := _describe_abnormal_end(process.returncode, is_late, seconds, shown)) is not None:
        show_failure(f"{why}; see {folder / LOG}", "the part's process")
    return shown


def _describe_abnormal_end(
    code: int, is_late: bool, seconds: float, rows: Sequence[CheckRow]
) -> str | None:
    """Return why the process of a part failed or has no rows; None if it ended as expected."""
    if is_late:
        return f"no end in {seconds / 60:.1f} minutes, so it was killed"
    if code < 0:
        return f"ended by {signal.Signals(-code).name}"
    if code:
        return f"exit code {code}"
    return None if rows else "it measured nothing"


def main(name: str, folder: Path, size: Size) -> None:
    """Measure all tasks of the part ``name``; use tiny models if little GPU memory is free."""
    end_with_parent()
    if size is Size.full and torch.cuda.mem_get_info()[0] < LEAST_FREE:
        size = Size.tiny
    module = import_module(f"rlhf.gpu_check.parts.{BY_NAME[name].module}")
    setting = CheckSetting(part=name, folder=folder, size=size)
    measure_and_write_rows(folder / ROWS, module.tasks(setting))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), Size(sys.argv[3]))
