"""Means over the seeds, and differences that are paired by seed, with 95 % intervals."""

from __future__ import annotations

import math
from collections.abc import Mapping

from papers.claims import Figures, Outcome, Verdict
from rlhf.base.intervals import Estimate, mean_with_interval


def number(figures: Figures, name: str) -> float:
    """Return one number of a seed.

    Raises:
        TypeError: if the figure is no number.
    """
    value = figures[name]
    if not isinstance(value, float | int):
        raise TypeError(f"{name}: {value!r} is no number")
    return float(value)


def mean_over(found: Mapping[int, Figures], name: str) -> Estimate:
    """Return the mean of a figure over the seeds."""
    return mean_with_interval([number(each, name) for each in found.values()])


def difference(found: Mapping[int, Figures], name: str, reference: str) -> Estimate:
    """Return the mean over the seeds of a figure minus another one of the same seed."""
    return mean_with_interval([number(f, name) - number(f, reference) for f in found.values()])


def told(estimate: Estimate) -> str:
    """Return the mean and its interval as words; one seed has no interval."""
    if math.isnan(estimate.half):
        return f"{estimate.mean:+.3f} (no interval)"
    return f"{estimate.mean:+.3f} ({estimate.low:+.3f} to {estimate.high:+.3f})"


def within(estimate: Estimate, margin: float, words: str) -> Verdict:
    """Pass if the interval lies within ``margin`` of 0, fail if it lies outside."""
    if estimate.low > -margin and estimate.high < margin:
        return Verdict(Outcome.PASSED, words)
    is_outside = estimate.low > margin or estimate.high < -margin
    return Verdict(Outcome.FAILED if is_outside else Outcome.OPEN, words)


def gains(estimate: Estimate, words: str, *, small: float = 0.0) -> Verdict:
    """Pass if the interval lies above 0, fail if it lies below ``small``."""
    if estimate.low > 0:
        return Verdict(Outcome.PASSED, words)
    return Verdict(Outcome.FAILED if estimate.high < small else Outcome.OPEN, words)
