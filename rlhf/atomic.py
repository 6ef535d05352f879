"""Replace files, links and folders atomically, and try again what a network drive refused."""

from __future__ import annotations

import errno
import os
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")
# Errors of network file systems that often pass; a full or read-only drive is not among them.
TRANSIENT = {errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EAGAIN, errno.EREMOTEIO}
WAITS = (0.5, 2.0, 8.0)  # seconds before the second, third and fourth attempt


def is_transient(error: BaseException) -> bool:
    """Return True if an error may pass; safetensors gives the number of its cause as text."""
    number = re.search(r"os error (\d+)", str(error))
    code = getattr(error, "errno", None) or (number and int(number[1]))
    return code in TRANSIENT


def retrying(attempt: Callable[[], T]) -> T:
    """Return the result of ``attempt``, which is called again after errors that may pass."""
    for seconds in WAITS:
        try:
            return attempt()
        except Exception as error:
            if not is_transient(error):
                raise
            time.sleep(seconds)
    return attempt()


@contextmanager
def replacing(path: Path, *, shared: bool = False) -> Iterator[Path]:
    """Yield a path for a new file, link or folder, which replaces ``path`` if the block succeeds.

    A reader sees the old content or the new content, and a failed block leaves the old content.
    With ``shared`` several processes may write at the same time; otherwise the next attempt removes
    what a killed process has left.
    """
    suffix = f"{os.getpid()}-{threading.get_ident()}" if shared else "building"
    building = path.with_name(f".{path.name}.{suffix}")
    _remove(building)
    try:
        yield building
        retrying(lambda: _put_in_place(building, path))
    finally:
        _remove(building)


def _put_in_place(building: Path, path: Path) -> None:
    if building.is_file() and not building.is_symlink():
        with building.open("rb") as file:
            os.fsync(file.fileno())  # a power cut must not leave a name without content
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    building.replace(path)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
