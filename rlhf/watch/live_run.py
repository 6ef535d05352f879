"""Read the files of a run or sweep as they grow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rlhf.base.errors import CheckpointError
from rlhf.base.intervals import mean_of
from rlhf.base.packaged_yaml import read_yaml_beside
from rlhf.base.stored_files import ALARMS, METRICS, SAMPLES, GrowingFile, find_entries
from rlhf.config.freeze import FROZEN, read_frozen_keys
from rlhf.report.charts import Point, RunFiles, add_points, read_metric_series
from rlhf.report.first_screen import read_verdict
from rlhf.report.page import Headline
from rlhf.report.run_charts import run_title
from rlhf.run.console import KEY_METRICS, KeyMetric
from rlhf.run.policies import DERIVED_MODELS
from rlhf.run.results import read_run_result
from rlhf.run.step_alarms import Alarm, parse_alarm
from rlhf.watch.progress import RunProgress, RunState, time_text

CURVE_PARTS = 10  # a headline compares the means of the first and the last tenth of a curve
RESULT_METRICS: Mapping[str, str] = read_yaml_beside(__file__, "result_metrics.yaml")


class LiveRun:
    """A run that may still be running, with its curves, answers and alarms so far.

    Raises:
        CheckpointError: if ``folder`` is not the directory of a run.
    """

    def __init__(self, folder: Path, beside: Sequence[Path] = ()) -> None:
        """Open the run in ``folder``; its charts also show the curves of the runs ``beside``."""
        self.folder = folder
        self._beside = {"/".join(run.parts[-2:]): read_metric_series(run) for run in beside}
        self.config = read_frozen_keys(folder)
        self.title = run_title(folder, self.config)
        self.progress = RunProgress(folder)
        self._files = [file.follow(folder) for file in (METRICS, SAMPLES, ALARMS)]
        self.curves: dict[str, list[Point]] = {}  # points by metric
        self.first_answers: dict[str, Mapping[str, Any]] = {}  # by prompt
        self.newest_answers: dict[str, Mapping[str, Any]] = {}  # by prompt
        self.alarms: list[Alarm] = []

    @property
    def faults(self) -> list[str]:
        """Return a message for each file that has damaged lines, which are skipped."""
        return [file.fault for file in self._files if file.fault is not None]

    def headline(self) -> Headline:
        """Return a line with the run's state, time left, result so far and number of alarms."""
        state, files = self.progress.state(), self.as_run_files()
        words = [state.text]
        if files.result is not None:
            verdict = read_verdict(files)
            return Headline(f"{state.text}; {verdict.text}", verdict.is_doubtful)
        if state.word == "running":
            word = "planned" if self.progress.phase is None else "left"
            words.append(f"{time_text(self.progress.hours_left())} {word}")
        names = (name for name in RESULT_METRICS if len(self.curves.get(name, ())) > 1)
        if (metric := next(names, None)) is not None:
            values = [value for _, value in self.curves[metric]]
            size = -(-len(values) // CURVE_PARTS)  # single batches are noisy
            first, last = mean_of(values[:size]), mean_of(values[-size:])
            words.append(f"{RESULT_METRICS[metric]} {first:.3f} → {last:.3f} so far")
        words.append(f"alarms: {len(self.alarms) or 'none'}")
        is_doubtful = bool(self.alarms or self.faults) or state.word in {"ended", "silent"}
        return Headline(", ".join(words), is_doubtful or None)

    def key_metric_values(self) -> list[tuple[KeyMetric, str, str]]:
        """Return the current phase's key metrics, each with its first and latest value as texts."""
        latest = self.progress.latest
        metrics = KEY_METRICS.get(self.progress.phase or "", ())
        return [
            (m, format(self.curves[m.name][0][1], m.format), format(latest[m.name], m.format))
            for m in metrics
            if latest.get(m.name) is not None
        ]

    def poll(self) -> bool:
        """Read what the run wrote since the last call; return True if any file has changed."""
        lines, samples, alarms = (file.read() for file in self._files)
        if lines.is_restarted:
            self.curves = {}
            self.progress.reset()
        if samples.is_restarted:
            self.first_answers, self.newest_answers = {}, {}
        if alarms.is_restarted:
            self.alarms = []
        for line in lines.values:
            add_points(self.curves, line)
        self.progress.add_lines(lines.values)
        for sample in samples.values:
            if sample.get("model") not in DERIVED_MODELS:
                self.first_answers.setdefault(sample["prompt"], sample)
                self.newest_answers[sample["prompt"]] = sample
        self.alarms += map(parse_alarm, alarms.values)
        return any(new.values or new.is_restarted for new in (lines, samples, alarms))

    def as_run_files(self) -> RunFiles:
        """Return the data from which the report's charts are built; samples: the newest answers."""
        return RunFiles(
            folder=self.folder,
            config=self.config,
            series=self.curves,
            samples=list(self.newest_answers.values()),
            alarms=self.alarms,
            result=read_run_result(self.folder),
            beside=self._beside,
        )


class JobRow(NamedTuple):
    """A row of a sweep's table of jobs: a job's name, state, step and result so far."""

    name: str
    state: RunState
    step: str
    reached: str
    objective: float | None = None  # of a finished job


class LiveSweep:
    """A sweep that may still be running, with a row for each job that has begun.

    Raises:
        CheckpointError: if no job has begun.
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
        for job in (path.parent for path in find_entries(self.folder, f"*/{FROZEN}")):
            if job.name not in self._jobs:
                self._jobs[job.name] = (RunProgress(job), METRICS.follow(job))
        self.rows = [_read_job_row(name, *job) for name, job in self._jobs.items()]

    @property
    def headline(self) -> str:
        """Return the name of the sweep, the number of finished jobs, and the best finished job."""
        finished = sum(row.state.word == "finished" for row in self.rows)
        text = f"sweep {self.folder.name}: {finished} of {len(self.rows)} jobs finished"
        known = [(row.objective, row.name) for row in self.rows if row.objective is not None]
        return f"{text}; best so far: {max(known)[1]}" if known else text

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
        result = read_run_result(progress.folder)
    except CheckpointError as error:
        return JobRow(name, RunState("ended", str(error)), step, "")
    if result is not None and result["objective"] is not None:
        objective = result["objective"]
        return JobRow(name, state, step, f"objective {objective:.3f}", objective)
    latest = progress.latest
    metric = next((name for name in RESULT_METRICS if latest.get(name) is not None), None)
    reached = f"{RESULT_METRICS[metric]} {latest[metric]:.3f}" if metric else ""
    return JobRow(name, state, step, reached)
