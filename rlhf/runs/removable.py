"""Find folders of runs that no later command needs."""

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

SECONDS_TO_START = 3600  # a run that began longer ago without logging a line is not starting


class Removable(NamedTuple):
    """A folder that can be removed, with a description and its size in bytes."""

    folder: Path
    description: str
    size: int


def find_removable(runs: Iterable[FoundRun]) -> Iterator[Removable]:
    """Yield the checkpoints of finished runs, and the folders of runs that never began.

    Folders of models are never yielded, nor any folder of a run that may be running or can resume.
    """
    for run in runs:
        has_begun = run.last_line or finished_phases(run.folder)
        is_starting = time.time() - run.started < SECONDS_TO_START
        if run.state == "finished":
            for phase in Phase:
                for folder in checkpoint_folders(run.folder / phase):
                    yield Removable(folder, f"checkpoint of {phase}", folder_size(folder))
        elif not has_begun and not is_starting and run.state not in {"running", "silent"}:
            yield Removable(run.folder, "run without a step", run.size)
