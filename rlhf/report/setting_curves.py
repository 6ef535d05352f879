"""Build charts of metrics over steps: a line for each setting, with a band over its seeds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from rlhf.base.intervals import mean_of
from rlhf.report.charts import FEWEST_JOINED, Chart, Line, line_chart
from rlhf.report.comparison import Setting
from rlhf.report.panels import PANELS, Panel
from rlhf.report.run_charts import ChartSection, x_label_of
from rlhf.report.run_files import PointsByMetric, read_series
from rlhf.tracking.metric_table import METRICS

MOST_SETTINGS = 8  # most lines in a chart: more could not be told apart
MOST_STEPS = 100  # points of a line; with more steps a point is the mean of several
MOST_NAMES = 4  # most runs of a setting that the legend names


class SettingCurves(NamedTuple):
    """The legend and the charts of several settings."""

    legend: Sequence[tuple[str, str]]  # label and runs of each setting
    sections: Sequence[ChartSection]
    note: str


def setting_curves(settings: Sequence[Setting]) -> SettingCurves:
    """Return a chart for each metric that any of the settings has, with a line for each setting."""
    drawn = settings[:MOST_SETTINGS]
    series = [[read_series(run.folder) for run in setting.runs] for setting in drawn]
    sections = [
        ChartSection(title, [chart for panel in panels for chart in _charts(panel, series)])
        for title, panels in PANELS.items()
    ]
    left_out = len(settings) - len(drawn)
    return SettingCurves(
        [(setting.label, _name_runs(setting)) for setting in drawn],
        [section for section in sections if any(section.charts)],
        f"{left_out} more settings are not drawn." if left_out else "",
    )


def seed_line(number: int, runs: Sequence[PointsByMetric], metric: str) -> Line:
    """Return the mean of a metric over runs, at steps that all of them have, with a band.

    The band is from the lowest to the highest value. Of many steps a point stands for several.
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
        low=[min(each) for each in values] if has_band else (),
        high=[max(each) for each in values] if has_band else (),
    )


def _charts(panel: Panel, series: Sequence[Sequence[PointsByMetric]]) -> list[Chart | None]:
    titles = [f"{panel.title}: {label}" for label in panel.labels] or [panel.title]
    return [
        line_chart(
            title,
            [seed_line(number, runs, metric) for number, runs in enumerate(series)],
            x_label=x_label_of(metric),
            unit="" if METRICS[metric].unit == "1" else METRICS[metric].unit,
            healthy=METRICS[metric].healthy_range,
        )
        for title, metric in zip(titles, panel.metrics, strict=True)
    ]


def _name_runs(setting: Setting) -> str:
    names = [f"{run.folder.parent.name}/{run.folder.name}" for run in setting.runs]
    more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
    return ", ".join(names[:MOST_NAMES]) + more
