"""The jobs of a sweep that is still running."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from rlhf.base.errors import CheckpointError
from rlhf.base.stored_files import METRICS
from rlhf.config.freeze import FROZEN
from rlhf.watch.growing_file import GrowingFile
from rlhf.watch.progress import METRICS_FILE, RunProgress, RunState

# What a running job has reached: the first of these metrics that it has.
REACHED = (
    *("ppo/eval_gold", "ppo/eval_score", "ppo/score_mean", "dpo/eval_accuracy", "dpo/accuracy"),
    *("reward/eval_accuracy", "reward/accuracy", "sft/eval_loss", "sft/loss"),
)


class JobRow(NamedTuple):
    """A job: its folder's name, and how far it is."""

    name: str
    state: RunState
    step: str
    reached: str


class LiveSweep:
    """The jobs whose folders are in the folder of a sweep.

    Raises:
        CheckpointError: if there is no job.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._jobs: dict[str, tuple[RunProgress, GrowingFile]] = {}
        self.rows: list[JobRow] = []
        self.poll()
        if not self._jobs:
            raise CheckpointError(
                f"{folder} holds no run: neither it nor a folder in it has {FROZEN}. Name the "
                "directory of a run, such as runs/latest, or of a sweep in runs/sweeps"
            )

    def poll(self) -> None:
        """Read what the jobs have written since the last call."""
        for path in sorted(self.folder.glob(f"*/{FROZEN}")):
            name, file = path.parent.name, path.parent / METRICS_FILE
            if name not in self._jobs:
                self._jobs[name] = (RunProgress(path.parent), GrowingFile(file, METRICS))
        self.rows = [_row(name, *job) for name, job in self._jobs.items()]

    @property
    def headline(self) -> str:
        """Return the name of the sweep, and how many of its jobs have finished."""
        finished = sum(row.state.word == "finished" for row in self.rows)
        return f"sweep {self.folder.name}: {finished} of {len(self.rows)} jobs finished"

    def job_folder(self, name: str) -> Path | None:
        """Return the folder of the job called ``name``; None if there is no such job."""
        return self._jobs[name][0].folder if name in self._jobs else None


def _row(name: str, progress: RunProgress, metrics: GrowingFile) -> JobRow:
    new = metrics.read()
    if new.is_restarted:
        progress.restart()
    progress.add(new.values)
    state = progress.state()
    step = progress.step_text
    try:
        result = progress.result()
    except CheckpointError as error:
        return JobRow(name, RunState("ended", str(error)), step, "")
    if result is not None and result["objective"] is not None:
        return JobRow(name, state, step, f"objective {result['objective']:.3f}")
    latest = progress.latest
    found = next((each for each in REACHED if latest.get(each) is not None), None)
    return JobRow(name, state, step, f"{found} {latest[found]:.3f}" if found else "")
