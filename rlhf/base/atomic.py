"""Replace files, links and folders atomically; retry operations that fail on network drives."""

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
# Error numbers of network file systems after which a retry often succeeds.
TRANSIENT_ERRORS = {errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EAGAIN, errno.EREMOTEIO}
RETRY_WAITS_S = (0.5, 2.0, 8.0)  # before the second, third and fourth attempt
AT_FDCWD, RENAME_EXCHANGE = -100, 2  # constants of <fcntl.h> and <linux/fs.h>
NO_EXCHANGE_ERRORS = {errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP}  # for example, on NFS


def system_error_number(error: BaseException) -> int | None:
    """Return the errno of ``error``, from its attribute or its text; None if it has no errno.

    Errors of safetensors, tokenizers and shutil have their errno only in their text.
    """
    if (number := getattr(error, "errno", None)) is not None:
        return int(number)
    match = re.search(r"(?:os error |Errno )(\d+)", str(error))
    return int(match[1]) if match else None


def is_transient(error: BaseException) -> bool:
    """Return True if the operation that raised ``error`` may succeed on a retry."""
    return system_error_number(error) in TRANSIENT_ERRORS


def retry_transient_errors(attempt: Callable[[], T]) -> T:
    """Return the result of ``attempt``; call it up to four times while errors are transient."""
    for seconds in RETRY_WAITS_S:
        try:
            return attempt()
        except Exception as error:
            if not is_transient(error):
                raise
            time.sleep(seconds)
    return attempt()


def await_path(path: Path, seconds: float = 90.0) -> None:
    """Wait until this machine sees ``path``, which another machine has written to a shared drive.

    An NFS client caches that a path is missing, for a minute or until it opens the folder again.

    Raises:
        FileNotFoundError: if ``path`` is still missing after ``seconds``.
    """
    deadline = time.monotonic() + seconds
    while not path.exists() and time.monotonic() < deadline:
        for folder in path.parents:
            with suppress(OSError):
                os.scandir(folder).close()
        time.sleep(min(0.5, seconds))
    path.stat()


@contextmanager
def replace_atomically(path: Path, *, shared: bool = False) -> Iterator[Path]:
    """Yield a path for a new file, link or folder, which replaces ``path`` if the block succeeds.

    A reader sees either the old or the new content; a failed block leaves the old content. With
    ``shared`` several processes may write at the same time. Without it only one process may, and
    the call first removes the temporary file that a killed process has left.

    Raises:
        OSError: if the drive is full or fails; the message names ``path``, or the file in it. An
            error of safetensors or tokenizers whose text has an errno becomes an OSError.
    """
    suffix = f"{os.getpid()}-{threading.get_ident()}" if shared else "building"
    building, aside = (path.with_name(f".{path.name}.{end}") for end in (suffix, "old"))
    try:
        if os.path.lexists(path):
            remove(aside)
        elif aside.exists():  # only the old file is left: a process was killed
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
        with suppress(OSError):  # a temporary file on a read-only drive stays
            remove(building)


def write_text_atomically(path: Path, text: str) -> None:
    """Write ``text`` in UTF-8 to a new file that replaces ``path``; "?" replaces lone surrogates.

    Raises:
        OSError: if the drive is full or fails; the message names ``path``.
    """
    with replace_atomically(path) as building:
        building.write_text(text, encoding="utf-8", errors="replace")


def _move_into_place(building: Path, path: Path, aside: Path) -> None:
    if building.is_file() and not building.is_symlink():
        with building.open("rb") as file:
            os.fsync(file.fileno())  # without it, a power cut could leave an empty file
    has_folder = any(p.is_dir() and not p.is_symlink() for p in (building, path))
    if not has_folder or not os.path.lexists(path):
        building.replace(path)
    elif not _exchange_paths(building, path):
        remove(aside)
        path.replace(aside)
        building.replace(path)
        remove(aside)


def _exchange_paths(one: Path, other: Path) -> bool:
    """Exchange two files or folders in one step; return False if the file system cannot do so."""
    libc = ctypes.CDLL(None, use_errno=True)
    names = os.fsencode(one), os.fsencode(other)
    try:
        code = libc.renameat2(AT_FDCWD, names[0], AT_FDCWD, names[1], RENAME_EXCHANGE)
    except AttributeError:  # this libc is too old to have renameat2
        return False
    if code and (number := ctypes.get_errno()) not in NO_EXCHANGE_ERRORS:
        raise OSError(number, os.strerror(number), str(other))
    return not code


def remove(path: Path) -> None:
    """Remove the folder, file or link (not its target) at ``path``, if there is one."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    elif os.path.lexists(path):  # on a read-only drive, removing a missing file fails too
        path.unlink(missing_ok=True)
