"""Convert errors of a drive to one error whose message has the file and the reason."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager

from rlhf.base.atomic import system_error_number
from rlhf.base.errors import RlhfError

# The drive is full, over a quota or a limit on file sizes, or read-only.
CANNOT_WRITE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS}
# As above, or the drive fails. Operations of sockets and processes do not raise these errors.
OF_DRIVES = CANNOT_WRITE | {errno.EIO, errno.ESTALE, errno.EREMOTEIO}
# Access is not permitted, or the path is of another kind, such as a folder instead of a file.
OF_FILES = {errno.EACCES, errno.EPERM, errno.EISDIR, errno.ENOTDIR, errno.ELOOP, errno.ENXIO}
ADVICE = "make room, or give another folder that can be written, and repeat the command"


class DriveError(RlhfError):
    """The error for a drive that does not let this process read or write a file."""


def as_drive_error(error: BaseException, advice: str = ADVICE) -> DriveError | None:
    """Return a DriveError with file, reason and ``advice``; None if no drive raised ``error``."""
    number, file = system_error_number(error), getattr(error, "filename", None)
    is_ours = number in OF_DRIVES or (file is not None and number in OF_FILES)
    if isinstance(error, RlhfError) or number is None or not is_ours:
        return None
    verb = "written" if number in CANNOT_WRITE else "read or written"
    return DriveError(
        f"{file or 'a file'} cannot be {verb} ({os.strerror(number)}). What was complete before "
        f"is intact; {advice}"
    )


@contextmanager
def convert_drive_errors(advice: str = ADVICE) -> Iterator[None]:
    """Convert errors of a drive in the block to a DriveError that ends in ``advice``.

    Raises:
        DriveError: with the file and the reason. Every other error is unchanged.
    """
    try:
        yield
    except Exception as error:
        if (refusal := as_drive_error(error, advice)) is None:
            raise
        raise refusal from error
