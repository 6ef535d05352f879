"""Turn errors of the drive, raised anywhere, into one message with the file and the reason."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager

from rlhf.base.atomic import system_error_number
from rlhf.base.errors import RlhfError

# Full, over a quota or a limit on sizes, read-only,
CANNOT_WRITE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS}
# or failing; the operations of a socket or a process have no such errors.
OF_DRIVES = CANNOT_WRITE | {errno.EIO, errno.ESTALE, errno.EREMOTEIO}
# Not permitted, or something else of that name, such as a folder where a file must be.
OF_FILES = {errno.EACCES, errno.EPERM, errno.EISDIR, errno.ENOTDIR, errno.ELOOP, errno.ENXIO}
WAY_ON = "make room, or give another folder that can be written, and repeat the command"


class DriveError(RlhfError):
    """A drive that does not let this process read or write a file."""


def refusal_of_drive(error: BaseException, way_on: str = WAY_ON) -> DriveError | None:
    """Return the file and the reason, and ``way_on``; None if ``error`` is not of a drive."""
    number, file = system_error_number(error), getattr(error, "filename", None)
    is_ours = number in OF_DRIVES or (file is not None and number in OF_FILES)
    if isinstance(error, RlhfError) or number is None or not is_ours:
        return None
    verb = "written" if number in CANNOT_WRITE else "read or written"
    return DriveError(
        f"{file or 'a file'} cannot be {verb} ({os.strerror(number)}). What was complete before "
        f"is intact; {way_on}"
    )


@contextmanager
def explaining_drive(way_on: str = WAY_ON) -> Iterator[None]:
    """Raise a DriveError, which ends in ``way_on``, instead of an error of the drive.

    Raises:
        DriveError: with the file and the reason. Every other error is unchanged.
    """
    try:
        yield
    except Exception as error:
        if (refusal := refusal_of_drive(error, way_on)) is None:
            raise
        raise refusal from error
