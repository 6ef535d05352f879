"""KL estimators and the controller of the KL price."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlhf.algorithms.kl import KlController, KlEstimatorName, adapt_lr_scale, estimate_kl
from tests.algorithms.padded_batches import assert_close, f64, quick


@pytest.mark.parametrize(
    ("estimator", "p_is_larger", "p_is_smaller"),
    [
        # d = log(1/2) - log(1/4) = +log 2 = 0.6931472, and -log 2 the other way round
        ("k1", 0.6931472, -0.6931472),
        ("k2", 0.2402265, 0.2402265),  # 0.6931472^2 / 2
        ("k3", 0.1931472, 0.3068528),  # 1/2 - 1 + 0.6931472 and 2 - 1 - 0.6931472
        ("k3_ratio", 0.1931472, 0.3068528),  # p itself sampled: the weight is 1
    ],
)
def test_estimators_by_hand(
    estimator: KlEstimatorName, p_is_larger: float, p_is_smaller: float
) -> None:
    logprobs, other_logprobs = f64(0.5, 0.25).log(), f64(0.25, 0.5).log()
    result = estimate_kl(logprobs, other_logprobs, estimator=estimator)
    assert_close(result, [p_is_larger, p_is_smaller], atol=1e-7)


def test_k3_with_the_ratio_of_a_policy_that_has_moved() -> None:
    """The value is k3 times the ratio, and the gradient is that of both factors."""
    logprobs, other, sampled = (f64(x).log() for x in (0.5, 0.25, 0.4))
    logprobs.requires_grad_()
    kl = estimate_kl(logprobs, other, estimator="k3_ratio", sampled_logprobs=sampled)
    assert_close(kl, [0.5 / 0.4 * 0.1931472], atol=1e-7)
    (slope,) = torch.autograd.grad(kl.sum(), logprobs)
    assert_close(slope, [0.5 / 0.4 * (0.1931472 + 1 - 0.5)], atol=1e-7)  # k3 + its slope 1 - e^-d


@quick
@given(difference=st.floats(-20.0, 20.0, width=32))
def test_k2_and_k3_are_never_negative_in_fp32(difference: float) -> None:
    logprobs = torch.tensor([difference, difference * 1e-3, difference * 1e-6])
    for estimator in ("k2", "k3"):
        assert (estimate_kl(logprobs, torch.zeros(3), estimator=estimator) >= 0).all()


def test_k3_of_close_policies_survives_fp32() -> None:
    # d = 1e-3: exp(-d) - 1 + d = d^2 / 2 - d^3 / 6 = 4.998334e-7, smaller than 10 fp32 steps at 1
    result = estimate_kl(torch.tensor([1e-3]), torch.zeros(1), estimator="k3")
    assert result.item() == pytest.approx(4.998334e-7, rel=1e-3)


@pytest.mark.parametrize(
    ("kl_per_sequence", "coefficient"),
    [
        # target 6, horizon 10,000, 256 sequences: error * 0.0256
        (6.0, 0.05),  # on target
        (6.6, 0.050128),  # error 0.1: 0.05 * (1 + 0.1 * 0.0256)
        (5.4, 0.049872),  # error -0.1: 0.05 * (1 - 0.1 * 0.0256)
        (12.0, 0.050256),  # error 1, held at 0.2: 0.05 * (1 + 0.2 * 0.0256)
        (-3.0, 0.049744),  # error -1.5, held at -0.2: 0.05 * (1 - 0.2 * 0.0256)
    ],
)
def test_controller_by_hand(kl_per_sequence: float, coefficient: float) -> None:
    controller = KlController(coefficient=0.05, target=6.0, horizon=10_000)
    after = controller.adapt_to_kl(kl_per_sequence, num_sequences=256)
    assert after.coefficient == pytest.approx(coefficient, abs=1e-12)
    assert (after.target, after.horizon) == (6.0, 10_000)
    assert controller.coefficient == 0.05


def test_without_a_target_the_coefficient_stays() -> None:
    controller = KlController(coefficient=0.05, target=None, horizon=10_000)
    assert controller.adapt_to_kl(100.0, num_sequences=256) == controller


@pytest.mark.parametrize(
    ("scale", "approx_kl", "after"),
    [
        # limit 0.02
        (1.0, 0.03, 1 / 1.5),  # above: falls
        (0.6, 0.021, 0.4),  # 0.6 / 1.5
        (0.6, 0.02, 0.6),  # on the limit: stays
        (0.6, 0.01, 0.6),  # on its half: stays
        (0.6, 0.009, 0.9),  # below the half: 0.6 * 1.5
        (0.9, 0.0, 1.0),  # no further than 1
        (0.0012, 5.0, 0.001),  # no further than 1e-3
        (0.6, math.nan, 0.6),
    ],
)
def test_learning_rate_guard_by_hand(scale: float, approx_kl: float, after: float) -> None:
    assert adapt_lr_scale(scale, approx_kl, limit=0.02) == pytest.approx(after, abs=1e-12)


def test_a_kl_that_is_not_a_number_leaves_the_coefficient() -> None:
    controller = KlController(0.3, target=1.0, horizon=100)
    assert controller.adapt_to_kl(math.nan, num_sequences=50) == controller
    assert controller.adapt_to_kl(math.inf, num_sequences=50).coefficient == pytest.approx(0.33)
