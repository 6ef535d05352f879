"""Replace files, links and folders atomically."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


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
        if building.is_file() and not building.is_symlink():
            with building.open("rb") as file:
                os.fsync(file.fileno())  # a power cut must not leave a name without content
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        building.replace(path)
    finally:
        _remove(building)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
