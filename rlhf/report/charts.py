"""Read the files of a run directory, and build charts as data for ``charts.js``."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import compress
from pathlib import Path
from typing import Any, NamedTuple

from rlhf.base.stored_files import METRICS as METRICS_FILE
from rlhf.base.stored_files import SAMPLES
from rlhf.config.freeze import read_frozen_keys
from rlhf.run.metric_table import METRICS, documented_name
from rlhf.run.results import read_run_result
from rlhf.run.step_alarms import Alarm, read_alarms

MOST_POINTS = 600  # most points per line; of more, the lowest and highest of each bucket are kept
FEWEST_JOINED = 6  # fewer points are drawn as dots: a line would suggest values between them
SHARE = "share"  # the unit of values between 0 and 1
DIGITS = 6  # significant digits of a value in a chart's data
MOST_SAMPLES = 4000  # the page shows at most this many samples, the last ones

Point = tuple[float, float]
PointsByMetric = Mapping[str, Sequence[Point]]  # points (step, value) by metric name


class Line(NamedTuple):
    """A line of a chart; ``half`` and ``x_half`` are half-widths of error bars in y and x."""

    label: str
    points: Sequence[Point]
    half: Sequence[float] = ()
    is_joined: bool = True  # False: draw dots without a line
    x_half: Sequence[float] = ()
    names: Sequence[str] = ()  # a name per point, shown instead of its x value
    settings: Sequence[int] = ()  # in a sweep, the setting's number (from 0) per point
    setting: int | None = None  # in a sweep, the setting's number of the whole line
    low: Sequence[float] = ()  # lower ends of a band around the line, per point
    high: Sequence[float] = ()  # upper ends of the band
    runs: Sequence[Sequence[float]] = ()  # y values per run, if the line is a mean of runs


class Flag(NamedTuple):
    """A mark at an x value: its text, and the id of the page element to which it links."""

    x: float
    text: str
    target: str


class Tick(NamedTuple):
    """A position on an axis, and its label."""

    at: float
    label: str


class LegendKey(NamedTuple):
    """An entry of a chart's legend; ``tone`` is the number of its colour in report.css."""

    label: str
    tone: int
    is_joined: bool


class Chart(NamedTuple):
    """A chart: texts (``description`` is for screen readers), and the data that charts.js draws."""

    title: str
    description: str
    unit: str
    healthy: str  # the text of the healthy range; "" without such a range
    keys: Sequence[LegendKey]
    flags: Sequence[Flag]
    data: dict[str, Any]
    note: str = ""


def line_chart(
    title: str,
    lines: Sequence[Line],
    *,
    x_label: str = "step",
    x_ticks: Sequence[Tick] | None = None,
    unit: str = "",
    healthy: Sequence[float] | None = None,
    flags: Sequence[Flag] = (),
) -> Chart | None:
    """Return a chart of up to eight lines, or None if no point is finite.

    Points that are not finite are dropped. ``healthy`` is a range of y values to shade. ``x_ticks``
    replace the default ticks of the x axis. The chart's description has each line's first and last
    value. If ``unit`` is ``SHARE`` and no value is above 1, the y axis ends at 1.
    """
    shown = [finite for line in lines if (finite := _drop_non_finite_points(line)).points]
    if not shown:
        return None
    value_ranges = "; ".join(
        f"{line.label} from {number_text(line.points[0][1])} to {number_text(line.points[-1][1])}"
        for line in shown
    )
    highest = max(y for line in shown for _, y in line.points)
    return Chart(
        title,
        f"{title}: {value_ranges}",
        unit,
        "" if healthy is None else "healthy range {:g} to {:g}".format(*healthy),
        [
            LegendKey(line.label, n if line.setting is None else line.setting, line.is_joined)
            for n, line in enumerate(shown)
        ],
        flags,
        {
            "xLabel": x_label,
            "ticks": x_ticks,
            "healthy": healthy,
            "most": 1 if unit == SHARE and highest <= 1 else None,
            "flags": [flag.x for flag in flags],
            "lines": [_line_data(line) | {"isSeries": "step" in x_label} for line in shown],
        },
    )


def number_text(value: float) -> str:
    """Return a number as short text: "0.123", "12346" for 12345.6, "1.2e+06"."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    if 1e3 <= abs(value) < 1e6:  # noqa: PLR2004
        return f"{value:.0f}"
    return f"{value:.3g}" if 1e-3 <= abs(value) < 1e3 else f"{value:.1e}"  # noqa: PLR2004


def thin_points(points: Sequence[Point]) -> list[Point]:
    """Return the points; of over ``MOST_POINTS``, only the lowest and highest of each bucket."""
    if len(points) <= MOST_POINTS:
        return list(points)
    size = math.ceil(2 * len(points) / MOST_POINTS)
    kept: list[Point] = []
    for start in range(0, len(points), size):
        bucket = points[start : start + size]
        kept += sorted({min(bucket, key=lambda p: p[1]), max(bucket, key=lambda p: p[1])})
    return kept


def _drop_non_finite_points(line: Line) -> Line:
    kept = [math.isfinite(y) for _, y in line.points]
    names = ("points", "half", "x_half", "names", "settings", "low", "high")
    columns: dict[str, Any] = {name: list(compress(getattr(line, name), kept)) for name in names}
    return line._replace(**columns, runs=[list(compress(run, kept)) for run in line.runs])


def _line_data(line: Line) -> dict[str, Any]:
    """Return the data of a line for charts.js, without empty columns."""
    keeps_all_points = line.half or line.names or line.low
    points = line.points if keeps_all_points else thin_points(line.points)
    columns: dict[str, Sequence[object]] = {
        "x": _round_values(x for x, _ in points),
        "y": _round_values(y for _, y in points),
        "half": _round_values(line.half),
        "xHalf": _round_values(line.x_half),
        "low": _round_values(line.low),
        "high": _round_values(line.high),
        "runs": list(map(_round_values, line.runs)),
        "names": line.names,
        "settings": line.settings,
    }
    data = {"label": line.label, "joined": line.is_joined}
    data |= {} if line.setting is None else {"setting": line.setting}
    return data | {name: column for name, column in columns.items() if column}


def _round_values(values: Iterable[float]) -> list[float]:
    return [float(f"{value:.{DIGITS}g}") if value % 1 else int(value) for value in values]


class RunFiles(NamedTuple):
    """The content of a run directory's files, from which its report is built."""

    folder: Path
    config: Mapping[str, Any]
    series: PointsByMetric
    samples: Sequence[Mapping[str, Any]]
    alarms: Sequence[Alarm]
    result: Mapping[str, Any] | None  # None: the run has not finished
    beside: Mapping[str, PointsByMetric] = {}  # by name, metrics of other runs that charts show too


def read_run_files(run_dir: Path) -> RunFiles:
    """Read the files that a run has written so far; skip an incomplete last line of a file."""
    return RunFiles(
        folder=run_dir,
        config=read_frozen_keys(run_dir),
        series=read_metric_series(run_dir),
        samples=list(SAMPLES.read_lines(run_dir))[-MOST_SAMPLES:],
        alarms=read_alarms(run_dir),
        result=read_run_result(run_dir),
    )


def read_metric_series(run_dir: Path) -> PointsByMetric:
    """Read the metrics that a run has logged so far; skip an incomplete last line."""
    series: dict[str, list[Point]] = {}
    for line in METRICS_FILE.read_lines(run_dir):
        add_points(series, line)
    return series


def add_points(series: dict[str, list[Point]], line: Mapping[str, Any]) -> None:
    """Add the points of one ``line`` of metrics.jsonl to ``series``."""
    for name, value in line.items():
        if documented_name(name) in METRICS:
            point = (line["step"], math.nan if value is None else value)
            series.setdefault(name, []).append(point)
