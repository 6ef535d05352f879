"""Paths that a user names, in keys of the configuration and in arguments of commands."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from rlhf.base.errors import ConfigError
from rlhf.base.foreign_errors import translate_errors

LFS_MARK = b"version https://git-lfs.github.com/spec/"
NOT_PULLED = "is a Git LFS pointer, not the file: run `git lfs pull` in its folder"


def expand_user_path(name: str | Path, *, key: str) -> Path:
    """Return the path ``name``, the value of ``key``, with ``~`` replaced by the home folder.

    Raises:
        ConfigError: if the path is empty, its home folder does not exist, or the system refuses
            to look it up. A path where nothing exists is accepted.
    """
    if not str(name).strip():
        raise ConfigError(f"{key}={name}: must name a file or folder")
    try:
        path = Path(name).expanduser()
    except RuntimeError as error:
        home = Path(name).parts[0]
        raise ConfigError(
            f"{key}={name}: there is no home folder {home} here; write the whole path"
        ) from error
    with (
        translate_errors(lambda reason: ConfigError(f"{key}={name}: not a usable path ({reason})")),
        suppress(FileNotFoundError, NotADirectoryError),
    ):
        path.stat()
    return path


def whole_path(name: Any) -> Any:
    """Return the absolute path of an existing file or folder if ``name`` is its relative path.

    Links are resolved, since runs/latest will point to other runs, except that a file keeps its
    name, whose suffix is its format. Items of a list are converted; other values are unchanged.
    """
    if isinstance(name, list):
        return [whole_path(item) for item in name]
    with suppress(OSError, ValueError):  # too long, or no path at all
        path = Path(name if isinstance(name, str) and name else "/")
        if not path.is_absolute() and path.exists():
            return str(path.resolve() if path.is_dir() else path.parent.resolve() / path.name)
    return name


def read_user_text(path: Path) -> str:
    """Return the text of a file.

    Raises:
        OSError: if it is a folder or cannot be read, or is no regular file: reading a named pipe
            or a device may never end.
        UnicodeDecodeError: if it is not UTF-8.
    """
    if path.exists() and not path.is_file():
        raise OSError(None, "not a regular file", str(path))
    return path.read_text(encoding="utf-8")


def find_lfs_pointer(files: Iterable[Path]) -> Path | None:
    """Return the first of the regular ``files`` that is a pointer of Git LFS; None if none is."""
    for file in files:
        with suppress(OSError), file.open("rb") as opened:
            if opened.read(len(LFS_MARK)) == LFS_MARK:
                return file
    return None


def relative_to_cwd(path: Path) -> Path:
    """Return ``path`` relative to the current folder if it is in that folder, else unchanged."""
    here = Path.cwd()
    return path.relative_to(here) if path.is_relative_to(here) else path
