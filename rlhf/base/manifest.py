"""Identify files by size and SHA-256, and compare a folder with its list of files."""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Container, Iterator, Mapping
from pathlib import Path

from rlhf.base.errors import CheckpointError

MANIFEST = "manifest.json"
Identity = list[int | str]  # size in bytes, and SHA-256


def file_identity(path: Path, *, flush: bool = False) -> Identity:
    """Return the size and the SHA-256 of a file; with ``flush`` also flush it to the drive."""
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
        if flush:
            os.fsync(file.fileno())
        return [file.tell(), found]


def file_identities(folder: Path, *, skip: Container[str] = ()) -> dict[str, Identity]:
    """Return size and SHA-256 of the files in ``folder``, by path, and flush them to the drive."""
    return {
        name: file_identity(folder / name, flush=True)
        for name in sorted(iterate_files(folder, skip))
    }


def check_files(
    folder: Path, files: Mapping[str, Identity], *, skip: Container[str] = (MANIFEST,)
) -> None:
    """Raise a CheckpointError unless ``folder`` has exactly ``files``, apart from ``skip``."""
    if odd := sorted(set(iterate_files(folder, skip)) ^ set(files)):
        raise CheckpointError(f"{folder / odd[0]} is missing, or not in {MANIFEST}.")
    for name, expected in files.items():
        path = folder / name
        if path.stat().st_size != expected[0] or file_identity(path) != expected:
            raise CheckpointError(f"{path} is damaged: it is not what was written.")


def iterate_files(folder: Path, skip: Container[str] = ()) -> Iterator[str]:
    """Yield relative paths of the regular files in ``folder``, except hidden files; no links.

    ``skip`` has paths of files, and names of files and folders in ``folder``, to leave out.
    """
    for path in folder.rglob("*"):
        parts = path.relative_to(folder).parts
        name = "/".join(parts)
        is_hidden = any(part.startswith(".") for part in parts)
        is_skipped = parts[0] in skip or name in skip or is_hidden
        if not is_skipped and stat.S_ISREG(path.lstat().st_mode):
            yield name
