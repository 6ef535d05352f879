"""Replace files, links and folders atomically; retry what a network drive refused."""

from __future__ import annotations

import ctypes
import errno
import os
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")
# Errors of network file systems after which a retry often succeeds, unlike for a full drive.
TRANSIENT = {errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EAGAIN, errno.EREMOTEIO}
WAITS = (0.5, 2.0, 8.0)  # seconds before the second, third and fourth attempt
AT_FDCWD, RENAME_EXCHANGE = -100, 2  # from <fcntl.h> and <linux/fs.h>
CANNOT_EXCHANGE = {errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP}  # for example, on NFS


def system_error_number(error: BaseException) -> int | None:
    """Return the errno of ``error``, or the number in its text; None if it has neither.

    Errors of safetensors, tokenizers and shutil have the number only in their text.
    """
    if (number := getattr(error, "errno", None)) is not None:
        return int(number)
    found = re.search(r"(?:os error |Errno )(\d+)", str(error))
    return int(found[1]) if found else None


def is_transient(error: BaseException) -> bool:
    """Return True if the operation that raised ``error`` may succeed on a retry."""
    return system_error_number(error) in TRANSIENT


def retry_transient_errors(attempt: Callable[[], T]) -> T:
    """Return the result of ``attempt``; call it up to four times while errors are transient."""
    for seconds in WAITS:
        try:
            return attempt()
        except Exception as error:
            if not is_transient(error):
                raise
            time.sleep(seconds)
    return attempt()


@contextmanager
def replace_atomically(path: Path, *, shared: bool = False) -> Iterator[Path]:
    """Yield a path for a new file, link or folder, which replaces ``path`` if the block succeeds.

    A reader sees the old content or the new content, and a failed block leaves the old content.
    With ``shared`` several processes may write at the same time; otherwise the next call removes
    the temporary file of a killed process.

    Raises:
        OSError: naming ``path``, if the drive refuses, also for errors of safetensors and
            tokenizers that are no OSError.
    """
    suffix = f"{os.getpid()}-{threading.get_ident()}" if shared else "building"
    building, aside = (path.with_name(f".{path.name}.{end}") for end in (suffix, "old"))
    try:
        if os.path.lexists(path):
            remove(aside)
        elif aside.exists():  # a process was killed between two renames
            aside.replace(path)
        remove(building)
        yield building
        retry_transient_errors(lambda: _move_into_place(building, path, aside))
    except Exception as error:
        number, named = system_error_number(error), str(getattr(error, "filename", None) or "")
        if number is None or (named and not named.startswith(str(building))):
            raise
        file = path / Path(named).relative_to(building) if named else path
        reason = getattr(error, "strerror", None) or os.strerror(number)
        raise OSError(number, reason, str(file)) from error
    finally:
        with suppress(OSError):  # on a read-only drive it stays; the next call removes it
            remove(building)


def write_text_atomically(path: Path, text: str) -> None:
    """Replace ``path`` by a file with ``text`` in UTF-8; "?" replaces a lone surrogate.

    Raises:
        OSError: naming ``path``, if the drive refuses.
    """
    with replace_atomically(path) as building:
        building.write_text(text, encoding="utf-8", errors="replace")


def _move_into_place(building: Path, path: Path, aside: Path) -> None:
    if building.is_file() and not building.is_symlink():
        with building.open("rb") as file:
            os.fsync(file.fileno())  # otherwise a power cut could leave an empty file
    has_folder = any(each.is_dir() and not each.is_symlink() for each in (building, path))
    if not has_folder or not os.path.lexists(path):
        building.replace(path)
    elif not _exchange(building, path):
        remove(aside)
        path.replace(aside)
        building.replace(path)
        remove(aside)


def _exchange(one: Path, other: Path) -> bool:
    """Exchange two paths in one step; return False if the file system cannot."""
    libc = ctypes.CDLL(None, use_errno=True)
    names = os.fsencode(one), os.fsencode(other)
    try:
        code = libc.renameat2(AT_FDCWD, names[0], AT_FDCWD, names[1], RENAME_EXCHANGE)
    except AttributeError:  # this libc is too old to have renameat2
        return False
    if code and (number := ctypes.get_errno()) not in CANNOT_EXCHANGE:
        raise OSError(number, os.strerror(number), str(other))
    return not code


def remove(path: Path) -> None:
    """Remove a folder, a file or a link (not its target); it is no error if nothing is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    elif os.path.lexists(path):  # on a read-only drive, removing a missing file fails too
        path.unlink(missing_ok=True)
