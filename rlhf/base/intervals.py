"""Means, and confidence intervals of means (over prompts or seeds) and of shares.

This project does not use scipy: if it is installed, transformers imports it at every start (0.6 s).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

NORMAL_QUANTILE = 1.96  # 97.5 % quantile of the normal distribution
CONFIDENCE = 0.95  # probability that an interval covers the mean
NUM_HALVINGS = 34  # bisection steps of t_quantile; its first interval is from 0 to 16
NUM_SUBINTERVALS = 400  # for Simpson's rule; an even number


class Estimate(NamedTuple):
    """A mean and the half-width of its 95 % confidence interval.

    The half-width is NaN for a single value and for a mean that is not finite.
    """

    mean: float
    half: float
    size: int  # number of values

    @property
    def low(self) -> float:
        """Return the lower end of the interval."""
        return self.mean - self.half

    @property
    def high(self) -> float:
        """Return the upper end of the interval."""
        return self.mean + self.half

    @property
    def excludes_zero(self) -> bool:
        """Return True if the interval does not contain 0; False for a single value."""
        return self.low > 0 or self.high < 0


def mean_of(values: Sequence[float]) -> float:
    """Return the mean; NaN if there are no values, or if the sum overflows or is NaN."""
    try:
        return statistics.fmean(values)
    except (OverflowError, ValueError):  # the run has diverged, or there are no values
        return math.nan


def mean_with_interval(values: Sequence[float]) -> Estimate:
    """Return the mean of independent values with Student's 95 % interval.

    Raises:
        ValueError: if there are no values.
    """
    if not values:
        raise ValueError("a mean needs at least one value")
    mean, degrees = mean_of(values), len(values) - 1
    if not degrees or not math.isfinite(mean):
        return Estimate(mean, math.nan, len(values))
    half = t_quantile(degrees) * statistics.stdev(values) / math.sqrt(len(values))
    return Estimate(mean, half, len(values))


def wilson_interval(successes: float, total: float) -> tuple[float, float]:
    """Return Wilson's 95 % confidence interval (low, high) of the share ``successes / total``.

    https://doi.org/10.1080/01621459.1927.10502953

    Raises:
        ValueError: if ``total`` is not positive.
    """
    if total <= 0:
        raise ValueError("a proportion needs at least one trial")
    share, z = successes / total, NORMAL_QUANTILE
    centre = (share + z * z / (2 * total)) / (1 + z * z / total)
    spread = share * (1 - share) / total + z * z / (4 * total * total)
    half = z * spread**0.5 / (1 + z * z / total)
    return centre - half, centre + half


@cache
def t_quantile(degrees: float) -> float:
    """Return the 97.5 % quantile of Student's t distribution, exact to about 1e-8.

    Raises:
        ValueError: if there is less than one degree of freedom.
    """
    if degrees < 1:
        raise ValueError(f"{degrees} degrees of freedom: at least one is needed")
    low, high = 0.0, 16.0  # the largest quantile, for one degree of freedom, is 12.7
    for _ in range(NUM_HALVINGS):
        middle = (low + high) / 2
        low, high = (
            (middle, high) if _probability_within(middle, degrees) < CONFIDENCE else (low, middle)
        )
    return (low + high) / 2


def two_sided_p_value(estimate: Estimate, degrees: float) -> float:
    """Return the two-sided p-value for a true mean of 0; NaN if ``half`` is 0 or NaN."""
    if not estimate.half > 0:
        return math.nan
    t = abs(estimate.mean) / estimate.half * t_quantile(degrees)
    return max(0.0, 1 - _probability_within(t, degrees))


def _probability_within(t: float, degrees: float) -> float:
    """Return the probability that a t-distributed number lies between -t and t.

    The substitution x = sqrt(degrees) tan(angle) makes the density a power of the cosine, which is
    integrated by Simpson's rule.
    """
    width = math.atan(t / math.sqrt(degrees)) / NUM_SUBINTERVALS
    inner_weights = (2 + 2 * (i % 2) for i in range(1, NUM_SUBINTERVALS))
    heights = [math.cos(i * width) ** (degrees - 1) for i in range(NUM_SUBINTERVALS + 1)]
    weights = [1, *inner_weights, 1]
    area = math.fsum(w * h for w, h in zip(weights, heights, strict=True)) * width / 3
    ratio = math.exp(math.lgamma((degrees + 1) / 2) - math.lgamma(degrees / 2))
    return 2 * area * ratio / math.sqrt(math.pi)
