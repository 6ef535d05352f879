"""Importance weights of rollouts that another policy sampled, by hand.

tests/algorithms/test_against_reference.py compares every level and mode with a slow loop.
"""

import pytest
import torch

from rlhf.base.random_streams import random_stream
from rlhf.options.corrections.off_policy import (
    CorrectionLevel,
    interpolate_logprobs,
    rollout_weights,
)
from tests.algorithms.padded_batches import assert_close, f64, normal


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
