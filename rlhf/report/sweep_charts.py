"""Build the charts of a sweep: frontiers and metrics over steps.

Points and lines have the number of their setting, so that the page's script can highlight them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from rlhf.base.intervals import Estimate, mean_of
from rlhf.report.charts import (
    FEWEST_JOINED,
    Chart,
    Line,
    Point,
    PointsByMetric,
    line_chart,
    read_metric_series,
)
from rlhf.report.comparison import Setting, estimate_text
from rlhf.report.run_charts import ChartSection, x_axis_label
from rlhf.run.metric_table import METRICS, PANELS, Panel

KL = "KL, nats"
UNLIMITED = (-math.inf, math.inf)
RANGE_OF_MEASURE = {
    **dict.fromkeys(("gold", "exactly right", "accuracy"), (0.0, 1.0)),
    **dict.fromkeys((KL, "tokens"), (0.0, math.inf)),
    "perplexity": (1.0, math.inf),
}  # lowest and highest possible value
MOST_SETTINGS = 8  # most lines in a chart; the colours of more lines would look alike
MOST_STEPS = 100  # most points of a line; with more steps, a point is the mean of several steps
MOST_NAMES = 4  # most runs of a setting that the legend names


def frontier_chart(measure: str, settings: Sequence[Setting]) -> Chart | None:
    """Return a chart of a measure over KL, both with 95 % intervals.

    A line joins the settings of the frontier: each is better than all settings at lower KL.
    Return None if no value is finite.
    """
    title, x_label = f"{measure.capitalize()} over KL", "KL to the reference, nats"
    xs, ys = ([setting.estimates()[name] for setting in settings] for name in (KL, measure))
    points = [(x.mean, y.mean) for x, y in zip(xs, ys, strict=True)]
    frontier = pareto_frontier(points)
    y_halves = [_half_width_to_draw(y, measure) for y in ys]
    x_halves = [_half_width_to_draw(x, KL) for x in xs]
    lines = [
        Line("frontier", [points[index] for index in frontier]),
        Line(
            "settings",
            points,
            half=y_halves,
            x_half=x_halves,
            is_joined=False,
            names=[
                f"{number}: {setting.label}, {x_label} {estimate_text(x)}"
                for number, (setting, x) in enumerate(zip(settings, xs, strict=True), 1)
            ],
            settings=range(len(settings)),
        ),
    ]
    drawn = zip([*ys, *xs], [*y_halves, *x_halves], strict=True)
    hidden = sum(estimate.half > half for estimate, half in drawn)
    note = f"Intervals that contain impossible values are not drawn: {hidden}."
    names = ", ".join(settings[index].label for index in frontier)
    description = f"{title}: on the frontier are {names}"
    chart = line_chart(title, lines, x_label=x_label)
    return chart and chart._replace(description=description, note=note if hidden else "")


def pareto_frontier(points: Sequence[Point]) -> list[int]:
    """Return the indices of the points that are higher than all points at lower x, sorted by x."""
    kept: list[int] = []
    for index in sorted(range(len(points)), key=lambda n: (points[n][0], -points[n][1])):
        if not kept or points[index][1] > points[kept[-1]][1]:
            kept.append(index)
    return kept


def _half_width_to_draw(estimate: Estimate, measure: str) -> float:
    """Return the half-width to draw; 0 (no interval) if part of the interval is impossible."""
    least, most = RANGE_OF_MEASURE.get(measure, UNLIMITED)
    is_possible = least <= estimate.low and estimate.high <= most  # False for NaN
    return estimate.half if is_possible else 0.0


class SettingCurves(NamedTuple):
    """The legend of several settings, and charts of metrics with a line for each setting."""

    legend: Sequence[tuple[str, str]]  # label and runs of each setting
    sections: Sequence[ChartSection]
    note: str


def setting_curves(settings: Sequence[Setting]) -> SettingCurves:
    """Return charts of the metrics over steps; at most MOST_SETTINGS settings get a line."""
    drawn = settings[:MOST_SETTINGS]
    series = [[read_metric_series(run.folder) for run in setting.runs] for setting in drawn]
    sections = [
        ChartSection(title, [chart for panel in panels for chart in _metric_charts(panel, series)])
        for title, panels in PANELS.items()
    ]
    left_out = len(settings) - len(drawn)
    return SettingCurves(
        [(setting.label, _run_names_text(setting)) for setting in drawn],
        [section for section in sections if any(section.charts)],
        f"{left_out} more settings are not drawn." if left_out else "",
    )


def seed_mean_line(number: int, runs: Sequence[PointsByMetric], metric: str) -> Line:
    """Return a line of a metric's mean over ``runs``, the runs of a setting, one per seed.

    It has the steps of all runs with the metric, the values of each run if there are several, and a
    band from the lowest to the highest value. With more than ``MOST_STEPS`` steps, each point is
    the mean over several steps. ``number`` is the index of the setting.
    """
    by_step = [dict(run[metric]) for run in runs if metric in run]
    steps = sorted(set.intersection(*map(set, by_step))) if by_step else []
    size = math.ceil(len(steps) / MOST_STEPS)
    buckets = [steps[start : start + size] for start in range(0, len(steps), size or 1)]
    values = [[run[step] for step in bucket for run in by_step] for bucket in buckets]
    middles = [bucket[len(bucket) // 2] for bucket in buckets]
    has_band = len(by_step) > 1 or size > 1
    return Line(
        str(number + 1),
        list(zip(middles, map(mean_of, values), strict=True)),
        is_joined=len(buckets) >= FEWEST_JOINED,
        setting=number,
        low=[min(of_bucket) for of_bucket in values] if has_band else (),
        high=[max(of_bucket) for of_bucket in values] if has_band else (),
        runs=[
            [mean_of([run[step] for step in bucket]) for bucket in buckets]
            for run in by_step
            if len(by_step) > 1
        ],
    )


def _metric_charts(panel: Panel, series: Sequence[Sequence[PointsByMetric]]) -> list[Chart | None]:
    titles = [f"{panel.title}: {label}" for label in panel.labels] or [panel.title]
    return [
        line_chart(
            title,
            [seed_mean_line(number, runs, metric) for number, runs in enumerate(series)],
            x_label=x_axis_label(metric),
            unit="" if METRICS[metric].unit == "1" else METRICS[metric].unit,
            healthy=METRICS[metric].healthy_range,
        )
        for title, metric in zip(titles, panel.metrics, strict=True)
        if metric == panel.metrics[0]
        # The metric of an option that is switched off is always 0.
        or any(y for runs in series for run in runs for _, y in run.get(metric, ()))
    ]


def _run_names_text(setting: Setting) -> str:
    names = [f"{run.folder.parent.name}/{run.folder.name}" for run in setting.runs]
    more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
    return ", ".join(names[:MOST_NAMES]) + more
