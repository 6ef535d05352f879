"""The most important charts of each phase for a report."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from rlhf.base.packaged_yaml import read_yaml_beside


class Panel(NamedTuple):
    """A chart: its title, its metrics, and a label per metric if there are several."""

    title: str
    metrics: tuple[str, ...]
    labels: tuple[str, ...] = ()


def _read_panels() -> dict[str, Sequence[Panel]]:
    """Read the sections of panels.yaml; a chart has a metric, or metrics with their labels."""
    return {
        title: [
            Panel(name, (metrics,))
            if isinstance(metrics, str)
            else Panel(name, tuple(metrics), tuple(metrics.values()))
            for name, metrics in charts.items()
        ]
        for title, charts in read_yaml_beside(__file__, "panels.yaml").items()
    }


PANELS: Mapping[str, Sequence[Panel]] = _read_panels()


def panels_of(names: Iterable[str]) -> dict[str, Sequence[Panel]]:
    """Return ``PANELS``, with further panels for parts of rewards among the metrics ``names``."""
    panels = dict(PANELS)
    for prefix, title in (
        ("ppo/parts/", "Parts of the score"),
        ("ppo/eval_parts/", "Parts, held-out"),
    ):
        parts = tuple(name for name in names if name.startswith(prefix))
        if parts:
            panel = Panel(title, parts, tuple(name.removeprefix(prefix) for name in parts))
            panels["PPO: reward"] = (*panels["PPO: reward"], panel)
    return panels
