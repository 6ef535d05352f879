"""The tables of metrics, which document every metric that is logged, and of the main charts.

They are metrics.yaml and panels.yaml here, and in the folders of options and methods.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from rlhf.base.packaged_yaml import merge_tables, read_yaml_beside
from rlhf.methods import Method, installed_methods, read_table, refuse_broken_methods
from rlhf.options import read_option_tables

FILE = "metrics.yaml"
PANELS_FILE = "panels.yaml"


class MetricInfo(NamedTuple):
    """Documentation of one metric; ``otherwise`` gives causes and fixes of unhealthy values."""

    unit: str
    meaning: str
    healthy: str
    otherwise: str
    healthy_range: Sequence[float] | None = None  # [low, high] if ``healthy`` is a range
    better: str | None = None  # "higher" or "lower"; None: neither is better


def _parse_groups(table: Mapping[str, Any]) -> dict[str, dict[str, MetricInfo]]:
    """Return metrics by group; raise TypeError if a metric lacks a field or has an unknown one."""
    return {
        title: {name: MetricInfo(**entry) for name, entry in group.items()}
        for title, group in table.items()
    }


def _read_tables(file: str, parse: Callable[[Mapping[str, Any]], object]) -> dict[str, Any]:
    """Return the tables ``file`` of the core, of options and of methods, as one table."""
    of_methods = (read_table(method, file, parse) for method in installed_methods())
    return merge_tables([read_yaml_beside(__file__, file), *read_option_tables(file), *of_methods])


TABLE = _read_tables(FILE, _parse_groups)
GROUPS: Mapping[str, Mapping[str, MetricInfo]] = _parse_groups(TABLE)
METRICS = {name: info for group in GROUPS.values() for name, info in group.items()}
# The name of our metric for each name that another program gives it.
OTHER_NAMES: Mapping[str, str] = {
    name: ours
    for ours, names in read_yaml_beside(__file__, "other_metrics.yaml").items()
    for name in names
}


class Panel(NamedTuple):
    """The definition of a chart: title, metrics, and a label per metric if there are several."""

    title: str
    metrics: tuple[str, ...]
    labels: tuple[str, ...] = ()


def _parse_panels(table: Mapping[str, Any]) -> dict[str, list[Panel]]:
    """Return the panels of panels.yaml (or of a table in its form) by section, PPO's first."""
    return {
        title: [
            Panel(name, (metrics,))
            if isinstance(metrics, str)
            else Panel(name, tuple(metrics), tuple(metrics.values()))
            for name, metrics in charts.items()
        ]
        for title, charts in sorted(table.items(), key=lambda item: not item[0].startswith("PPO"))
    }


PANEL_TABLE = _read_tables(PANELS_FILE, _parse_panels)
PANELS: Mapping[str, Sequence[Panel]] = _parse_panels(PANEL_TABLE)


def panels_for_metrics(names: Iterable[str]) -> dict[str, Sequence[Panel]]:
    """Return ``PANELS``, plus panels for those metrics ``names`` that belong to reward parts."""
    refuse_broken_methods()
    panels = dict(PANELS)
    titles = {"ppo/parts/": "Parts of the score", "ppo/eval_parts/": "Parts, held-out"}
    for prefix, title in titles.items():
        if metrics := tuple(name for name in names if name.startswith(prefix)):
            panel = Panel(title, metrics, tuple(name.removeprefix(prefix) for name in metrics))
            panels["PPO: reward"] = (*panels["PPO: reward"], panel)
    return panels


def metrics_of(method: Method) -> set[str]:
    """Return the names of the metrics that only runs with ``method`` log."""
    return {name for group in read_table(method, FILE, _parse_groups).values() for name in group}


def documented_name(name: str) -> str:
    """Return the key of the metric ``name`` in ``METRICS``.

    Users choose the last part of some names. For these the key is GROUP/NAME, literally with NAME.
    """
    group, _, last = name.rpartition("/")
    return f"{group}/NAME" if last and f"{group}/NAME" in METRICS else name


def better_direction(name: str) -> str | None:
    """Return "higher" or "lower" if such values of a metric are better; None if neither is."""
    info = METRICS.get(documented_name(name))
    return None if info is None else info.better


def describe_undocumented_metric(name: str) -> str | None:
    """Return a message with the nearest documented name; None if the metric is documented."""
    if documented_name(name) in METRICS:
        return None
    nearest = difflib.get_close_matches(name, METRICS, n=1, cutoff=0.0)[0]
    return f"{name} is in no metrics.yaml; the nearest documented metric is {nearest}"


def varies_between_runs(name: str) -> bool:
    """Return True for metrics of time, speed or memory, which differ even between equal runs."""
    return name.startswith(("time/", "speed/", "memory/")) or name.endswith("_per_second")
