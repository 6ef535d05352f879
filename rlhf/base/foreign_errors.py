"""Turn the errors of libraries and of the file system into errors that a user can fix.

For a damaged file, transformers raises OSError, ValueError, KeyError, RuntimeError, ImportError and
more, and tokenizers a plain Exception. So an error counts as one of a library if it is an OSError,
has a type of a library, or is a built-in error raised in a library's code: it concerns the input.
A built-in error raised in our own code is a bug, which keeps its traceback.
"""

from __future__ import annotations

import errno
import os
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from rlhf.base.atomic import system_error_number
from rlhf.base.errors import CapabilityError, RlhfError

if TYPE_CHECKING:
    from pydantic import ValidationError

PACKAGE = Path(__file__).parents[1]
# Errors of a drive that is full or read-only, or over a quota or a limit on file sizes.
WRITE_ERRORS = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS}
# Errors of a drive that fails or cannot be written; sockets and processes never raise them.
DRIVE_ERRORS = WRITE_ERRORS | {errno.EIO, errno.ESTALE, errno.EREMOTEIO}
# Errors of a path that is missing, invalid, not accessible, or of a wrong kind, such as a folder.
PATH_ERRORS = {errno.EACCES, errno.EPERM, errno.EISDIR, errno.ENOTDIR, errno.ELOOP, errno.ENXIO}
PATH_ERRORS |= {errno.ENOENT, errno.EINVAL, errno.ENAMETOOLONG}
REPEAT_COMMAND = "repeat the command"


@contextmanager
def translate_errors(build_error: Callable[[str], RlhfError]) -> Iterator[None]:
    """Raise ``build_error(reason)`` if a library or the file system raises an error in the block.

    Raises:
        Exception: unchanged, if it is an RlhfError, a failed allocation or a bug of this program.
    """
    try:
        yield
    except BaseException as error:
        # A panic of a Rust library, such as tokenizers, is a BaseException but no Exception.
        is_error = isinstance(error, Exception) or type(error).__name__ == "PanicException"
        lacks_memory = isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"
        if not is_error or lacks_memory or not is_foreign(error):
            raise
        raise build_error(reason_of(error)) from error


@contextmanager
def require_package(setting: str, package: str, way_out: str) -> Iterator[None]:
    """Raise a CapabilityError with ``way_out`` if ``package`` cannot be imported in the block."""
    try:
        yield
    except ImportError as error:
        raise CapabilityError(
            f"{setting}: the package {package} is not installed; {way_out}"
        ) from error


def is_foreign(error: BaseException) -> bool:
    """Return True if a library or the file system raised ``error``, and not our own code."""
    if isinstance(error, OSError) or type(error) is Exception:
        return True  # our own code never raises a plain Exception; tokenizers does
    if (module := type(error).__module__) != "builtins":
        return module.partition(".")[0] != PACKAGE.name
    frames = list(traceback.walk_tb(error.__traceback__))
    return bool(frames) and PACKAGE not in Path(frames[-1][0].f_code.co_filename).parents


def reason_of(error: BaseException) -> str:
    """Return the message of ``error`` in one line; add the error's type to an unclear message."""
    if isinstance(error, OSError) and error.strerror and error.filename:
        return f"{error.strerror}: {error.filename}"
    if isinstance(error, KeyError) and error.args:
        return f"{error.args[0]!r} is missing"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = " ".join(lines[: 2 if lines and lines[0].endswith(":") else 1])  # a title and its text
    is_clear = isinstance(error, OSError | ValueError) or type(error) is Exception
    return text if text and is_clear else f"{type(error).__name__}: {text}".removesuffix(": ")


def remedy_of(error: BaseException) -> str:
    """Return advice on what to do about a file that cannot be read or written."""
    if system_error_number(error) in PATH_ERRORS - {errno.EACCES, errno.EPERM}:
        return "restore the folders of this path if they were moved, or choose another path"
    if system_error_number(error) == errno.EFBIG:
        return "raise the limit on file sizes (ulimit -f)"
    return "make room on the drive, or make the folder writable"


class DriveError(RlhfError):
    """The error for a file that cannot be read or written: full drive, no permission and others."""


def to_drive_error(error: BaseException, then: str = REPEAT_COMMAND) -> DriveError | None:
    """Return a DriveError whose advice ends in ``then``; None if ``error`` is not about a file."""
    number, file = system_error_number(error), getattr(error, "filename", None)
    is_of_file = number in DRIVE_ERRORS or (file is not None and number in PATH_ERRORS)
    if isinstance(error, RlhfError) or number is None or not is_of_file:
        return None
    verb = "written" if number in WRITE_ERRORS else "read or written"
    return DriveError(
        f"{file or 'a file'} cannot be {verb} ({os.strerror(number)}). Files that were complete "
        f"are intact; {remedy_of(error)}, then {then}"
    )


@contextmanager
def convert_drive_errors(then: str = REPEAT_COMMAND) -> Iterator[None]:
    """Convert errors of files and drives in the block to DriveErrors; see ``to_drive_error``."""
    try:
        yield
    except Exception as error:
        if (refusal := to_drive_error(error, then)) is None:
            raise
        raise refusal from error


def describe_fault(error: ValidationError) -> str:
    """Return place, value and rule of the first fault that pydantic has found."""
    fault = error.errors(include_url=False)[0]
    place = "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in fault["loc"])
    value = "" if fault["type"] == "missing" else f"={fault['input']!r:.60}"
    rule = fault["msg"].removeprefix("Value error, ")
    return f"{place.lstrip('.')}{value}: {rule}" if place else rule
