"""Intervals against numbers worked by hand, published quantiles and the share that they cover."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf.base.intervals import (
    Estimate,
    mean_with_interval,
    t_quantile,
    two_sided_p_value,
    wilson_interval,
)


@pytest.mark.parametrize(
    ("freedom", "quantile"),
    [
        *((1, 12.7062), (2, 4.30265), (10, 2.22814), (11, 2.20099), (20, 2.08596), (60, 2.00030)),
        *((799, 1.96294), (1e6, 1.95997)),
    ],
)
def test_quantiles_are_the_published_ones(freedom: float, quantile: float) -> None:
    assert t_quantile(freedom) == pytest.approx(quantile, abs=1e-5 * quantile)


def test_less_than_one_degree_of_freedom_is_refused() -> None:
    with pytest.raises(ValueError, match=r"0\.5 degrees of freedom"):
        t_quantile(0.5)


def test_interval_of_three_values_by_hand() -> None:
    found = mean_with_interval([1.0, 2.0, 3.0])
    assert (found.mean, found.size) == (2.0, 3)
    assert found.half == pytest.approx(4.30265 / math.sqrt(3))
    assert (found.low, found.high) == pytest.approx((2 - found.half, 2 + found.half))
    assert not found.excludes_zero
    assert mean_with_interval([11.0, 12.0, 13.0]).excludes_zero
    assert mean_with_interval([-11.0, -12.0, -13.0]).excludes_zero


def test_one_value_has_no_interval_and_none_is_refused() -> None:
    found = mean_with_interval([5.0])
    assert found.mean == 5.0
    assert math.isnan(found.half)
    assert not found.excludes_zero
    with pytest.raises(ValueError, match="at least one value"):
        mean_with_interval([])


@pytest.mark.parametrize(
    ("successes", "low", "high"),
    [
        # n = 10, z^2 = 3.8416: centre (share + 0.19208) / 1.38416
        # half 1.96 * sqrt(share * (1 - share) / 10 + 0.009604) / 1.38416
        (8, 0.4901568, 0.9433191),  # 0.99208 / 1.38416 -+ 1.96 * sqrt(0.025604) / 1.38416
        (5, 0.2365896, 0.7634104),  # 0.5 -+ 1.96 * sqrt(0.034604) / 1.38416
        (0, 0.0, 0.2775402),  # 0.19208 / 1.38416 -+ the same
        (10, 0.7224598, 1.0),
    ],
)
def test_wilson_interval_by_hand(successes: int, low: float, high: float) -> None:
    assert wilson_interval(successes, 10) == pytest.approx((low, high), abs=1e-7)


@settings(deadline=None, max_examples=30, derandomize=True, database=None)
@given(total=st.integers(1, 10_000), data=st.data())
def test_wilson_interval_lies_around_the_share_and_shrinks(total: int, data: st.DataObject) -> None:
    successes = data.draw(st.integers(0, total))
    low, high = wilson_interval(successes, total)
    assert -1e-12 <= low <= successes / total + 1e-12
    assert successes / total - 1e-12 <= high <= 1 + 1e-12
    four_low, four_high = wilson_interval(4 * successes, 4 * total)
    assert four_high - four_low < high - low
    # its ends are where the share is 1.96 standard errors away
    for end in (low, high):
        deviation = 1.96 * math.sqrt(abs(end * (1 - end)) / total)
        assert abs(successes / total - end) == pytest.approx(deviation, abs=1e-7)


@pytest.mark.parametrize(
    "values", [[math.nan, 1.0], [math.inf, 1.0], [math.inf, -math.inf, 0.0], [1e308, 1e308, 1e308]]
)
def test_values_without_a_finite_mean_have_no_interval(values: list[float]) -> None:
    found = mean_with_interval(values)
    assert not math.isfinite(found.mean)
    assert math.isnan(found.half)
    assert not found.excludes_zero
    assert math.isnan(found.low)


def test_probability_belongs_to_the_interval() -> None:
    edge = Estimate(2.0, 2.0, 4)  # the interval touches 0
    assert two_sided_p_value(edge, 3) == pytest.approx(0.05, abs=1e-6)
    t = 5 * t_quantile(2)  # with two degrees of freedom P(|T| > t) = 1 - t / sqrt(2 + t^2)
    by_hand = 1 - t / math.sqrt(2 + t * t)
    assert two_sided_p_value(Estimate(5.0, 1.0, 3), 2) == pytest.approx(by_hand, rel=1e-4)
    assert math.isnan(two_sided_p_value(Estimate(0.0, 0.0, 3), 2))
    assert math.isnan(two_sided_p_value(Estimate(1.0, math.nan, 1), 1))
