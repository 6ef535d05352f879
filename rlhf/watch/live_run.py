"""Read the files of a run or sweep as they grow."""

from __future__ import annotations

import math
from collections.abc import Mapping
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

from rlhf.base.errors import CheckpointError
from rlhf.base.stored_files import ALARM, METRICS, SAMPLE, GrowingFile
from rlhf.config.freeze import FROZEN, read_frozen_keys
from rlhf.report.charts import MOST_POINTS, Point, PointsByMetric, RunFiles
from rlhf.report.page import Headline
from rlhf.run.console import KEY_METRICS, KeyMetric
from rlhf.run.metric_table import METRICS as KNOWN
from rlhf.run.metric_table import documented_name
from rlhf.run.policies import DERIVED_MODELS
from rlhf.run.step_alarms import Alarm, parse_alarm
from rlhf.watch.progress import METRICS_FILE, RunProgress, RunState, time_text

# Metrics that are drawn over KL: their points are matched by step, so no point is dropped.
OVER_KL = {
    *("ppo/kl_to_reference", "ppo/score_mean", "ppo/score_std"),
    *("ppo/eval_kl", "ppo/eval_score", "ppo/eval_gold"),
}
MOST_BUCKETS = MOST_POINTS // 2 - 2  # full buckets of 2 points; the open bucket needs points too
# The result so far of a running job is the first of these metrics that the job has logged.
REACHED = (
    *("ppo/eval_gold", "ppo/eval_score", "ppo/score_mean", "dpo/eval_accuracy", "dpo/accuracy"),
    *("reward/eval_accuracy", "reward/accuracy", "sft/eval_loss", "sft/loss"),
)


class ThinLine:
    """A line of at most ``MOST_POINTS`` points: the lowest and the highest point per bucket.

    Full buckets do not change until there are too many. Then pairs of buckets are merged.
    Because this is rare, a page that follows the line mostly receives new points only.
    """

    def __init__(self) -> None:
        self._full: list[tuple[Point, Point]] = []  # lowest and highest point of each bucket
        self._size = 1  # points that fill a bucket
        self._open: list[Point] = []  # the points of the last bucket, which is not full
        self._last: list[Point] = []  # the point that was added last

    def add(self, point: Point) -> None:
        """Append ``point``, whose x is the largest so far."""
        self._last = [point]
        self._open.append(point)
        if len(self._open) == self._size:
            self._full.append(_lowest_and_highest(self._open))
            self._open = []
        if len(self._full) == MOST_BUCKETS:
            pairs = zip(self._full[::2], self._full[1::2], strict=True)
            self._full = [_lowest_and_highest([*left, *right]) for left, right in pairs]
            self._size *= 2

    def points(self) -> list[Point]:
        """Return the points that are kept, and always the last point that was added."""
        buckets = [*self._full, _lowest_and_highest(self._open)] if self._open else self._full
        kept = [point for bucket in buckets for point in sorted({*bucket})]
        return kept if kept[-1:] == self._last else kept + self._last


def _lowest_and_highest(points: list[Point]) -> tuple[Point, Point]:
    """Return the lowest and the highest of ``points``."""
    return min(points, key=itemgetter(1)), max(points, key=itemgetter(1))


class LiveRun:
    """A run that may still be running: its curves, answers and alarms so far.

    Raises:
        CheckpointError: if ``folder`` is not the directory of a run.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.config = read_frozen_keys(folder)
        self.progress = RunProgress(folder)
        self._metrics = GrowingFile(folder / METRICS_FILE, METRICS)
        self._samples = GrowingFile(folder / "samples.jsonl", SAMPLE)
        self._alarms = GrowingFile(folder / "alarms.jsonl", ALARM)
        self._curves: dict[str, ThinLine] = {}
        self.over_kl: dict[str, list[Point]] = {}
        self.first: dict[str, Mapping[str, Any]] = {}  # first answer by prompt
        self.newest: dict[str, Mapping[str, Any]] = {}  # newest answer by prompt
        self.alarms: list[Alarm] = []

    @property
    def faults(self) -> list[str]:
        """Return a message for each file that has damaged lines, which are skipped."""
        files = (self._metrics, self._samples, self._alarms)
        return [file.fault for file in files if file.fault is not None]

    def headline(self) -> Headline:
        """Return a line with the run's state, the time that is left, and the number of alarms."""
        state, result = self.progress.state(), self.progress.result()
        words = [state.text]
        if result is not None and result["objective"] is not None:
            words.append(f"objective {result['objective']:.3f}")
        if state.word in {"running", "silent"}:
            words.append(f"{time_text(self.progress.hours_left())} left")
        if self.alarms:
            words.append(f"alarms: {len(self.alarms)}")
        is_doubtful = bool(self.alarms or self.faults) or state.word in {"ended", "silent"}
        return Headline(", ".join(words), is_doubtful)

    def key_metric_values(self) -> list[tuple[KeyMetric, str]]:
        """Return the latest values of the key metrics of the current phase, as texts."""
        latest = self.progress.latest
        metrics = KEY_METRICS.get(self.progress.phase or "", ())
        return [
            (m, format(latest[m.name], m.format)) for m in metrics if latest.get(m.name) is not None
        ]

    def poll(self) -> bool:
        """Read the lines that the run wrote since the last call; return True if there are any."""
        lines, samples, alarms = (
            file.read() for file in (self._metrics, self._samples, self._alarms)
        )
        if lines.is_restarted:
            self._curves, self.over_kl = {}, {}
            self.progress.reset()
        if samples.is_restarted:
            self.first, self.newest = {}, {}
        if alarms.is_restarted:
            self.alarms = []
        for line in lines.values:
            self._add_points(line)
        self.progress.add_lines(lines.values)
        for sample in samples.values:
            if sample.get("model") not in DERIVED_MODELS:
                self.first.setdefault(sample["prompt"], sample)
                self.newest[sample["prompt"]] = sample
        self.alarms += map(parse_alarm, alarms.values)
        return any(new.values or new.is_restarted for new in (lines, samples, alarms))

    def _add_points(self, line: Mapping[str, Any]) -> None:
        for name, value in line.items():
            if documented_name(name) in KNOWN:
                if value is not None:
                    self._curves.setdefault(name, ThinLine()).add((line["step"], value))
                if name in OVER_KL:
                    point = (line["step"], math.nan if value is None else value)
                    self.over_kl.setdefault(name, []).append(point)

    def curves(self) -> dict[str, list[Point]]:
        """Return the points of each metric, at most ``MOST_POINTS``."""
        return {name: line.points() for name, line in self._curves.items()}

    def as_run_files(self, series: PointsByMetric) -> RunFiles:
        """Return the data from which the report's charts are built; ``series`` has their points."""
        return RunFiles(
            folder=self.folder,
            config=self.config,
            series=series,
            samples=list(self.newest.values()),
            alarms=self.alarms,
            result=None,
        )


class JobRow(NamedTuple):
    """A row of the table of jobs: a job's name, state, step and result so far."""

    name: str
    state: RunState
    step: str
    reached: str


class LiveSweep:
    """A sweep that may still be running: a row for each job with a folder in the sweep's folder.

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
        """Read the lines that the jobs have written since the last call; update ``rows``."""
        for path in sorted(self.folder.glob(f"*/{FROZEN}")):
            name, file = path.parent.name, path.parent / METRICS_FILE
            if name not in self._jobs:
                self._jobs[name] = (RunProgress(path.parent), GrowingFile(file, METRICS))
        self.rows = [_read_job_row(name, *job) for name, job in self._jobs.items()]

    @property
    def headline(self) -> str:
        """Return the name of the sweep, and how many of its jobs have finished."""
        finished = sum(row.state.word == "finished" for row in self.rows)
        return f"sweep {self.folder.name}: {finished} of {len(self.rows)} jobs finished"

    def job_folder(self, name: str) -> Path | None:
        """Return the folder of the job called ``name``; None if there is no such job."""
        return self._jobs[name][0].folder if name in self._jobs else None


def _read_job_row(name: str, progress: RunProgress, metrics: GrowingFile) -> JobRow:
    new = metrics.read()
    if new.is_restarted:
        progress.reset()
    progress.add_lines(new.values)
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
