"""A part of gpu_check that ends as its name says: python -m ... NAME FOLDER SIZE."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from rlhf.gpu_check import rows
from rlhf.gpu_check.rows import Task, checked_row, measure_and_write_rows

FINE: Task = ("fine", lambda: checked_row(True, "1", ""))


def tasks(name: str, folder: Path) -> Iterator[Task]:
    if name == "nothing":
        return
    yield FINE
    if name == "raises":
        yield "broken", lambda: checked_row(True, str(1 / 0), "")
        yield FINE
    if name == "crashes":
        os.kill(os.getpid(), signal.SIGSEGV)
    if name == "exits":
        sys.exit(3)
    if name == "stuck":
        rows.MOST_QUIET = 0.5
        rows.extend_deadline()
        time.sleep(100)
    if name == "hangs":
        child = subprocess.Popen(["sleep", "100"])
        (folder / "child").write_text(str(child.pid))
        time.sleep(100)


if __name__ == "__main__":
    place = Path(sys.argv[2])
    measure_and_write_rows(place / "rows.jsonl", tasks(sys.argv[1], place))
