"""Importance weights of rollouts that another policy sampled, by hand.

tests/algorithms/test_against_reference.py compares every level and mode with a slow loop.
"""

from __future__ import annotations

import math

import pytest
import torch

from rlhf.base.random_streams import random_stream
from rlhf.options.corrections.off_policy import (
    CorrectionLevel,
    interpolate_logprobs,
    rollout_weights,
)
from tests.algorithms.padded_batches import assert_close, f64, keep_of, normal

# Ratios 1/2, 1, 2 and a dead cell; then 4.
SAMPLED = f64([-1.0, -2.0, -3.0, math.nan], [-2.0, math.nan, math.nan, math.nan])
RATIOS = f64([0.5, 1.0, 2.0, 9.0], [4.0, 9.0, 9.0, 9.0])
KEEP = keep_of([3, 1], 4)


@pytest.mark.parametrize(
    ("level", "masks", "expected"),
    [
        ("token", False, [0.5, 1.0, 1.5, 1.5]),
        ("token", True, [0.0, 1.0, 0.0, 0.0]),  # IcePop's two sides
        ("sequence", False, [1.0, 1.0, 1.0, 1.5]),  # 1/2 * 1 * 2 = 1
        ("sequence", True, [1.0, 1.0, 1.0, 0.0]),
        ("geometric", True, [1.0, 1.0, 1.0, 0.0]),
    ],
)
def test_weights_by_hand(level: CorrectionLevel, masks: bool, expected: list[float]) -> None:
    logprobs_BT = (SAMPLED + RATIOS.log()).requires_grad_()
    limits = {"cap": 1.5, "floor": 0.75}
    found = rollout_weights(logprobs_BT, SAMPLED, KEEP, level=level, masks=masks, **limits)
    assert_close(found.weights_BT[KEEP], expected)
    assert_close(found.weights_BT[~KEEP], [1.0] * 4)
    assert not found.weights_BT.requires_grad


def test_weights_of_an_impossible_token_stay_finite() -> None:
    sampled_BT, keep_BT = torch.tensor([[-1e4, 0.0]]), torch.ones(1, 2, dtype=torch.bool)
    found = rollout_weights(
        torch.tensor([[0.0, -1e4]]), sampled_BT, keep_BT, level="token", cap=2.0
    )
    assert found.weights_BT.tolist() == [[2.0, 0.0]]


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
def test_the_control_deals_the_same_weights_to_others(level: CorrectionLevel) -> None:
    keep_BT = torch.ones(40, 5, dtype=torch.bool)
    pair = (normal(40, 5, seed=1, scale=0.3), normal(40, 5, seed=2, scale=0.3), keep_BT)
    limits = {"level": level, "masks": True, "cap": 1.15, "floor": 0.85}
    plain = rollout_weights(*pair, **limits)
    first, again = (
        rollout_weights(*pair, **limits, shuffle=random_stream(1, "control", 3)) for _ in range(2)
    )
    other = rollout_weights(*pair, **limits, shuffle=random_stream(1, "control", 4))
    assert 0.1 < plain.limited_BT.double().mean() < 0.9
    assert first.weights_BT.flatten().sort().values.equal(plain.weights_BT.flatten().sort().values)
    assert first.weights_BT.eq(0).equal(first.limited_BT)
    assert first.weights_BT.equal(again.weights_BT)
    assert not first.weights_BT.equal(other.weights_BT)
    # Independent of the tokens: far fewer stay where they were than a half.
    assert (
        first.limited_BT[plain.limited_BT].double().mean() < plain.limited_BT.double().mean() + 0.2
    )


def test_the_interpolated_policy_lies_between_in_logs() -> None:
    logprobs_BT, sampled_BT = f64([-1.0]).requires_grad_(), f64([-3.0])
    found_BT = interpolate_logprobs(logprobs_BT, sampled_BT, share=0.25)
    assert_close(found_BT, [[-1.5]])
    assert not found_BT.requires_grad
