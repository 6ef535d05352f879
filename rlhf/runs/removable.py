"""Find what runs leave behind that no later command needs, and remove it."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from rlhf.config.choices import Phase
from rlhf.run.phase_state import checkpoint_folders
from rlhf.run.results import finished_phases
from rlhf.runs.registry import FoundRun, folder_size

SECONDS_TO_START = 3600  # a run without a first line that began longer ago is not starting


class Removable(NamedTuple):
    """A folder that can be removed, what it is, and its size in bytes."""

    folder: Path
    what: str
    size: int


def find_removable(runs: Iterable[FoundRun]) -> list[Removable]:
    """Return the checkpoints of finished runs, and the folders of runs that never began.

    Of a run that is running, or that can be resumed, nothing is returned; nor are models.
    """
    return [each for run in runs for each in _find_in_run(run)]


def _find_in_run(run: FoundRun) -> Iterator[Removable]:
    if run.state == "finished":
        for phase in Phase:
            for folder in checkpoint_folders(run.folder / phase):
                yield Removable(folder, f"checkpoint of {phase}", folder_size(folder))
        return
    began = run.last_line or finished_phases(run.folder)
    is_starting = run.state in {"running", "silent"} or time.time() - run.started < SECONDS_TO_START
    if not began and not is_starting:
        yield Removable(run.folder, "start without a step", run.size)


def remove_all(found: Iterable[Removable]) -> None:
    """Remove the folders; what others have removed meanwhile is no error."""
    for each in found:
        if each.folder.is_dir() and not each.folder.is_symlink():
            shutil.rmtree(each.folder)
