"""SAPO's gate beside its formula, and its gradient beside PPO's."""

import math

import pytest
import torch

from rlhf_sapo.gate import sapo_loss

KEEP = torch.ones(1, 1, dtype=torch.bool)


@pytest.mark.parametrize(("advantage", "temperature"), [(2.0, 1.0), (-0.5, 1.05)])
@pytest.mark.parametrize("log_ratio", [0.0, 0.4, -1.0])
def test_the_gate_is_a_sigmoid_of_the_ratio(
    advantage: float, temperature: float, log_ratio: float
) -> None:
    logprobs = torch.tensor([[log_ratio]], requires_grad=True)
    loss = sapo_loss(
        logprobs, torch.zeros(1, 1), torch.tensor([[advantage]]), KEEP, temperatures=(1.0, 1.05)
    ).loss
    loss.backward()
    ratio = math.exp(log_ratio)
    share = 1 / (1 + math.exp(-temperature * (ratio - 1)))
    assert float(loss) == pytest.approx(-advantage * share * 4 / temperature)
    expected = -advantage * ratio * 4 * share * (1 - share)
    assert logprobs.grad is not None
    assert float(logprobs.grad) == pytest.approx(expected, rel=1e-5)
