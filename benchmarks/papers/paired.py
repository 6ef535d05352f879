"""Differences that are paired by seed, and their intervals."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from papers.claims import Figures
from rlhf.base.intervals import mean_with_interval


class Difference(NamedTuple):
    """A mean over the seeds and its 95 % interval; NaN ends for a single seed."""

    mean: float
    low: float
    high: float

    @property
    def text(self) -> str:
        """Return the mean and the interval."""
        return f"{self.mean:+.3f} ({self.low:+.3f} to {self.high:+.3f})"


def differences(found: Mapping[int, Figures], figure: str, reference: str) -> Difference:
    """Return the mean of ``figure`` minus ``reference`` over the seeds, with Student's interval."""
    estimate = mean_with_interval(
        [number(each, figure) - number(each, reference) for each in found.values()]
    )
    return Difference(estimate.mean, estimate.low, estimate.high)


def number(figures: Figures, name: str) -> float:
    """Return one number of a seed."""
    value = figures[name]
    assert isinstance(value, float | int), f"{name}: {value!r} is no number"
    return float(value)
