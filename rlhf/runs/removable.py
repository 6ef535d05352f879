"""Find what runs leave behind that no later command needs."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from rlhf.base.stored_files import folder_size
from rlhf.config.choices import Phase
from rlhf.run.phase_state import checkpoint_folders
from rlhf.run.results import finished_phases
from rlhf.runs.registry import FoundRun

SECONDS_TO_START = 3600  # a run that began longer ago, and has no line, is not starting


class Removable(NamedTuple):
    """A folder that can be removed, what it is, and its size in bytes."""

    folder: Path
    what: str
    size: int


def find_removable(runs: Iterable[FoundRun]) -> Iterator[Removable]:
    """Yield the checkpoints of finished runs, and the folders of runs that never began.

    Models are not yielded, and nothing of a run that is running, or has begun and can resume.
    """
    for run in runs:
        began = run.last_line or finished_phases(run.folder)
        is_starting = time.time() - run.started < SECONDS_TO_START
        if run.state == "finished":
            for phase in Phase:
                for folder in checkpoint_folders(run.folder / phase):
                    yield Removable(folder, f"checkpoint of {phase}", folder_size(folder))
        elif not began and not is_starting and run.state not in {"running", "silent"}:
            yield Removable(run.folder, "start without a step", run.size)
