"""The table of the main charts, in the order in which pages and trackers show them.

It is panels.yaml here, and in the folders of options and methods that have charts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from rlhf.base.packaged_yaml import merge_tables, read_yaml_beside
from rlhf.methods import installed_methods, read_table, refuse_broken_methods
from rlhf.options import read_option_tables

PANELS_FILE = "panels.yaml"


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


PANEL_TABLE = merge_tables(
    [
        read_yaml_beside(__file__, PANELS_FILE),
        *read_option_tables(PANELS_FILE),
        *(read_table(method, PANELS_FILE, _parse_panels) for method in installed_methods()),
    ]
)
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
