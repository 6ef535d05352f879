"""Read the files of a run directory for its report."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rlhf.base.stored_files import CRITIC_STATE, SAMPLE, read_lines
from rlhf.base.stored_files import METRICS as METRICS_LINE
from rlhf.checkpoint.results import read_run_result
from rlhf.config.freeze import frozen_keys
from rlhf.report.charts import Point
from rlhf.tracking.jsonl import CRITIC
from rlhf.tracking.metric_table import METRICS, documented_name
from rlhf.tracking.step_alarms import Alarm, read_alarms

MOST_SAMPLES = 4000  # most samples on the page; earlier samples are dropped

PointsByMetric = Mapping[str, Sequence[Point]]  # points (step, value) by name of metric


class RunFiles(NamedTuple):
    """The content of a run directory's files."""

    folder: Path
    config: Mapping[str, Any]
    series: PointsByMetric
    samples: Sequence[Mapping[str, Any]]
    alarms: Sequence[Alarm]
    result: Mapping[str, Any] | None  # None: the run has not finished
    critic: Sequence[Mapping[str, Any]] = ()  # states of checks of the critic


def read_run_files(run_dir: Path) -> RunFiles:
    """Read the files that a run has written so far; skip an incomplete last line."""
    return RunFiles(
        folder=run_dir,
        config=frozen_keys(run_dir),
        series=read_series(run_dir),
        samples=list(read_lines(run_dir / "samples.jsonl", SAMPLE))[-MOST_SAMPLES:],
        alarms=read_alarms(run_dir),
        result=read_run_result(run_dir),
        critic=list(read_lines(run_dir / CRITIC, CRITIC_STATE)),
    )


def read_series(run_dir: Path) -> PointsByMetric:
    """Return the metrics that a run has logged so far; skip an incomplete last line."""
    series: dict[str, list[Point]] = {}
    for line in read_lines(run_dir / "metrics.jsonl", METRICS_LINE):
        for name, value in line.items():
            if documented_name(name) in METRICS:
                point = (line["step"], math.nan if value is None else value)
                series.setdefault(name, []).append(point)
    return series
