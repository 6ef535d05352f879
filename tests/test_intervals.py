"""Intervals against numbers worked by hand, published quantiles and the share that they cover."""

from __future__ import annotations

import math
import random

import pytest

from rlhf.intervals import estimate, paired_gain, t_quantile


@pytest.mark.parametrize(
    ("freedom", "quantile"),
    [(1, 12.706), (2, 4.303), (10, 2.228), (11, 2.201), (20, 2.086), (60, 2.000), (799, 1.963)],
)
def test_quantiles_are_the_published_ones(freedom: int, quantile: float) -> None:
    assert t_quantile(freedom) == pytest.approx(quantile, abs=0.0015)


def test_interval_of_three_values_by_hand() -> None:
    found = estimate([1.0, 2.0, 3.0])
    assert (found.mean, found.size) == (2.0, 3)
    assert found.half == pytest.approx(4.303 / math.sqrt(3))
    assert (found.low, found.high) == pytest.approx((2 - found.half, 2 + found.half))
    assert not found.excludes_zero
    assert estimate([11.0, 12.0, 13.0]).excludes_zero
    assert estimate([-11.0, -12.0, -13.0]).excludes_zero


def test_one_value_has_no_interval_and_none_is_refused() -> None:
    found = estimate([5.0])
    assert found.mean == 5.0
    assert math.isnan(found.half)
    assert not found.excludes_zero
    with pytest.raises(ValueError, match="at least one value"):
        estimate([])


def test_pairs_remove_what_they_share() -> None:
    before = [0.0, 10.0, 20.0, 30.0]
    found = paired_gain(before, [value + 1 for value in before])
    assert (found.mean, found.half) == (1.0, 0.0)
    with pytest.raises(ValueError, match="is shorter"):
        paired_gain(before, before[1:])


@pytest.mark.parametrize("size", [3, 8, 40])
def test_interval_covers_the_mean_in_95_of_100_samples(size: int) -> None:
    draws = random.Random(size)
    samples = [[draws.gauss(7, 2) for _ in range(size)] for _ in range(2000)]
    covered = sum(found.low <= 7 <= found.high for found in map(estimate, samples)) / len(samples)
    assert covered == pytest.approx(0.95, abs=0.02)
