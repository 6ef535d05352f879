"""The table of metrics (metrics.yaml): only documented metrics may be logged."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import NamedTuple

from rlhf.base.packaged_yaml import read_yaml_beside


class MetricInfo(NamedTuple):
    """Documentation of one metric; ``otherwise`` gives causes and fixes of unhealthy values."""

    unit: str
    meaning: str
    healthy: str
    otherwise: str
    healthy_range: tuple[float, float] | None = None  # (low, high) if ``healthy`` is a range
    better: str | None = None  # higher or lower; None: neither


def _metric_info(*, healthy_range: tuple[float, float] | None = None, **texts: str) -> MetricInfo:
    if healthy_range is not None:
        low, high = healthy_range
        healthy_range = (low, high)
    return MetricInfo(**texts, healthy_range=healthy_range)


# A TypeError if an entry lacks a field, or has an unknown one.
GROUPS: Mapping[str, Mapping[str, MetricInfo]] = {
    title: {name: _metric_info(**entry) for name, entry in group.items()}
    for title, group in read_yaml_beside(__file__, "metrics.yaml").items()
}
METRICS = {name: info for group in GROUPS.values() for name, info in group.items()}


def documented_name(name: str) -> str:
    """Return the key of a metric in ``METRICS``, where NAME replaces a name that users choose."""
    group, _, last = name.rpartition("/")
    return f"{group}/NAME" if last and f"{group}/NAME" in METRICS else name


def better_direction(name: str) -> str | None:
    """Return in which direction the metric ``name`` is better: higher, lower or None (neither)."""
    return METRICS[documented_name(name)].better


def check_metric_name(name: str) -> None:
    """Check that a metric is documented; otherwise raise KeyError with the nearest name."""
    if documented_name(name) in METRICS:
        return
    nearest = difflib.get_close_matches(name, METRICS, n=1, cutoff=0.0)[0]
    raise KeyError(
        f"unknown metric {name!r}; the nearest is {nearest!r}. "
        "A new metric needs an entry in rlhf/tracking/metrics.yaml."
    )


def is_timing(name: str) -> bool:
    """Return True for metrics of time, speed or memory, which differ even between equal runs."""
    return name.startswith(("time/", "speed/", "memory/")) or name.endswith("_per_second")
