"""Decide if a file can be trusted: only this user and root can have written or can replace it."""

from __future__ import annotations

import errno
import grp
import os
import pwd
import stat
from contextlib import suppress
from pathlib import Path

from rlhf.base.cpu import cache_folder
from rlhf.base.hashing import sha256_of
from rlhf.base.stored_files import read_bytes

REMEMBERED = "remembered"  # folder of the user's cache with an empty file for each hash


def is_trusted(path: Path) -> bool:
    """Return True if only this user and root can have written ``path``, or can replace it.

    The folders and links that lead to ``path`` are checked too, up to the root: whoever can write
    in one of these folders could replace ``path``, even after this check. If ``path`` is a folder,
    its content is not checked.

    Raises:
        OSError: if there is no such file or folder.
    """
    return _is_safe_path(Path(os.path.realpath(path, strict=True)), path.absolute())


def make_own_folder(folder: Path) -> None:
    """Create ``folder`` and its parents, unless they exist, so that only this user can write there.

    The umask of many machines lets a group write in new folders.

    Raises:
        OSError: if a folder cannot be created, or another user can write in one that exists.
    """
    for path in (*reversed(folder.absolute().parents), folder):
        path.mkdir(mode=0o755, exist_ok=True)
    require_trusted(folder)


def require_trusted(path: Path) -> None:
    """Raise an OSError unless only this user and root can have written ``path``."""
    if not is_trusted(path):
        raise OSError(errno.EPERM, "another user owns it, or can write to it; chown, or chmod go-w")


def keep_others_from_writing(*paths: Path) -> None:
    """Remove the permission to write to ``paths`` from their groups and from others."""
    for path in paths:
        path.chmod(path.stat().st_mode & ~0o022)


def remember(path: Path) -> None:
    """Record in the user's cache, if possible, that this user wrote the content of a file."""
    with suppress(OSError):
        make_own_folder(cache_folder() / REMEMBERED)
        _remembered_place(path).touch()


def is_remembered(path: Path) -> bool:
    """Return True if ``remember`` has recorded that this user wrote the content of a file."""
    with suppress(OSError):  # there is no such file
        return is_trusted(_remembered_place(path))
    return False


def _remembered_place(path: Path) -> Path:
    return cache_folder() / REMEMBERED / sha256_of(read_bytes(path) or b"")


def _is_safe_path(real: Path, path: Path) -> bool:
    for place in (path, *path.parents):
        status = place.lstat()
        if status.st_uid not in {0, os.getuid()}:
            return False
        if stat.S_ISLNK(status.st_mode):
            if not _is_safe_path(real, place.parent / place.readlink()):
                return False
        # In a sticky folder such as /tmp, other users cannot replace files of this user.
        elif _others_can_write(status) and (place == real or not status.st_mode & stat.S_ISVTX):
            return False
    return True


def _others_can_write(status: os.stat_result) -> bool:
    by_group = status.st_mode & stat.S_IWGRP and not _is_private_group(status.st_gid)
    return bool(status.st_mode & stat.S_IWOTH or by_group)


def _is_private_group(number: int) -> bool:
    """Return True if the group has this user's name, as many systems do, and no other member."""
    try:
        user, group = pwd.getpwuid(os.getuid()).pw_name, grp.getgrgid(number)
    except KeyError:  # in a container, a user or group may have no name
        return False
    return group.gr_name == user and {user} >= set(group.gr_mem)
