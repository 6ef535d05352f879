"""KL estimators and the controller of the KL price."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlhf.algorithms.kl import KlController, adapt_lr_scale, estimate_kl
from tests.algorithms.padded_batches import quick


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
