"""Confidence intervals of means, over prompts or over seeds, and of shares."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple

# 97.5 % quantiles of Student's t distribution, for 1, 2, ... degrees of freedom.
T_QUANTILES = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228,
)  # fmt: skip
NORMAL_QUANTILE = 1.96


class Estimate(NamedTuple):
    """A mean and the half-width of its 95 % interval; NaN for a single value."""

    mean: float
    half: float
    size: int

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


def estimate(values: Sequence[float]) -> Estimate:
    """Return the mean of independent values with Student's 95 % interval.

    Raises:
        ValueError: if there are no values.
    """
    if not values:
        raise ValueError("a mean needs at least one value")
    mean, freedom = statistics.fmean(values), len(values) - 1
    if not freedom:
        return Estimate(mean, math.nan, 1)
    half = t_quantile(freedom) * statistics.stdev(values) / math.sqrt(len(values))
    return Estimate(mean, half, len(values))


def paired_gain(before: Sequence[float], after: Sequence[float]) -> Estimate:
    """Return the mean of the differences between paired values, with its 95 % interval."""
    return estimate([b - a for a, b in zip(before, after, strict=True)])


def wilson_interval(
    successes: float, total: float, *, z: float = NORMAL_QUANTILE
) -> tuple[float, float]:
    """Return Wilson's confidence interval (low, high) of a share; 95 % at z = 1.96.

    https://doi.org/10.1080/01621459.1927.10502953

    Raises:
        ValueError: ``total`` is not positive.
    """
    if total <= 0:
        raise ValueError("a share needs at least one trial")
    share = successes / total
    centre = (share + z * z / (2 * total)) / (1 + z * z / total)
    spread = share * (1 - share) / total + z * z / (4 * total * total)
    half = z * spread**0.5 / (1 + z * z / total)
    return centre - half, centre + half


def t_quantile(freedom: int) -> float:
    """Return the 97.5 % quantile of Student's t distribution.

    Beyond the table: Cornish and Fisher's expansion, https://doi.org/10.2307/1905419.
    """
    if freedom <= len(T_QUANTILES):
        return T_QUANTILES[freedom - 1]
    z = NORMAL_QUANTILE
    first = (z**3 + z) / (4 * freedom)
    second = (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * freedom**3)
    return z + first + second + third
