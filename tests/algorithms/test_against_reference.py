"""Pieces of PPO against the slow reference, on random ragged batches in float64.

``tests/phases/ppo/`` has policy losses (test_objective.py) and whole steps (test_trainer.py).
"""

import math
from functools import partial
from typing import NamedTuple

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from rlhf.algorithms.advantages import grpo_advantages, reinforce_pp_advantages, rloo_advantages
from rlhf.algorithms.ppo import policy_loss, value_loss
from rlhf.options.corrections.off_policy import CorrectionLevel, rollout_weights
from tests.algorithms import loop_reference as reference
from tests.algorithms.loop_reference import Rows
from tests.algorithms.padded_batches import assert_close, keeps, normal, quick, seeds, with_garbage

TOLERANCE = 1e-6


def rows_of(x_BT: Tensor, keep_BT: Tensor) -> Rows:
    """The kept tokens as plain numbers."""
    return [x[keep].tolist() for x, keep in zip(x_BT, keep_BT, strict=True)]


def assert_rows(x_BT: Tensor, keep_BT: Tensor, expected: Rows) -> None:
    """Kept tokens are as expected, the others 0."""
    assert_close(x_BT[keep_BT], [x for row in expected for x in row], atol=TOLERANCE)
    assert not x_BT[~keep_BT].any()


class Batch(NamedTuple):
    """One random ragged batch, nan wherever nothing is kept."""

    keep_BT: Tensor
    old_logprobs_BT: Tensor
    logprobs_BT: Tensor
    reference_logprobs_BT: Tensor
    old_values_BT: Tensor
    values_BT: Tensor
    ended_B: Tensor


def random_batch(keep_BT: Tensor, seed: int) -> Batch:
    """Log-probs and values that have moved enough for both clips to hold some tokens."""
    one, two, three, four, five = (
        normal(*keep_BT.shape, seed=10 * seed + part) for part in range(5)
    )
    old, values = -one.abs() - 0.1, 2 * two
    tensors = (old, old + 0.3 * three, old + 0.5 * four, values, values + 0.5 * five)
    ended_B = normal(len(keep_BT), seed=10 * seed + 6) > 0
    return Batch(keep_BT, *(with_garbage(x, keep_BT, math.nan) for x in tensors), ended_B)


batches = st.builds(random_batch, keeps(), seeds)
shares = st.floats(0.1, 1.0)


@quick
@given(keep=keeps(), seed=seeds, copies=st.integers(2, 4), gamma=shares)
def test_advantages_without_a_critic(keep: Tensor, seed: int, copies: int, gamma: float) -> None:
    keep = keep.repeat(copies, 1)[:, torch.arange(keep.shape[1])]
    rewards_BT = with_garbage(normal(*keep.shape, seed=seed), keep, math.nan)
    rows = rows_of(rewards_BT, keep)
    dr_grpo = partial(grpo_advantages, divides=False)
    for estimate in (rloo_advantages, grpo_advantages, dr_grpo):
        result = estimate(rewards_BT, keep, group_size=copies)
        expected = reference.group_advantages(
            rows,
            group_size=copies,
            leaves_one_out=estimate is rloo_advantages,
            divides=estimate is not dr_grpo,
        )
        assert_rows(result.advantages_BT, keep, expected)
        assert_rows(result.returns_BT, keep, reference.rewards_to_go(rows, gamma=1.0))
    result = reinforce_pp_advantages(rewards_BT, keep, gamma=gamma)
    assert_rows(result.advantages_BT, keep, reference.rewards_to_go(rows, gamma=gamma))
    assert result.returns_BT.equal(result.advantages_BT)


@quick
@given(batch=batches, cliprange=st.sampled_from([None, 0.2, 0.5]))
def test_the_value_loss(batch: Batch, cliprange: float | None) -> None:
    keep, returns_BT = batch.keep_BT, batch.reference_logprobs_BT
    values_BT = batch.values_BT.clone().requires_grad_()
    found = value_loss(values_BT, batch.old_values_BT, returns_BT, keep, cliprange_value=cliprange)
    found.loss.backward()
    old, returns = rows_of(batch.old_values_BT, keep), rows_of(returns_BT, keep)

    def loop(values: Rows) -> reference.Loss:
        return reference.value_loss(values, old, returns, cliprange=cliprange)

    rows = rows_of(batch.values_BT, keep)
    assert_close(found.loss.detach(), loop(rows).total, atol=TOLERANCE)
    assert_close(found.critic_loss.value(), loop(rows).mean, atol=TOLERANCE)
    assert_close(found.value_clipfrac.value(), loop(rows).clipfrac, atol=TOLERANCE)
    slopes = reference.gradient(lambda values: loop(values).total, rows)
    assert_rows(values_BT.grad, keep, slopes)


levels = st.sampled_from(["token", "sequence", "geometric"])


@quick
@given(batch=batches, level=levels, masks=st.booleans())
def test_a_weighted_loss_is_decoupled(batch: Batch, level: CorrectionLevel, masks: bool) -> None:
    """The clip holds around the proximal policy; the weight, its ratio to the sampler, is fixed."""
    keep, sampled_BT, advantages_BT = batch.keep_BT, batch.reference_logprobs_BT, batch.values_BT
    logprobs_BT = batch.logprobs_BT.clone().requires_grad_()
    proximal_BT = batch.old_logprobs_BT
    limits = {"masks": masks, "cap": 1.2, "floor": 0.8}
    found = rollout_weights(proximal_BT, sampled_BT, keep, level=level, **limits)
    weighted_BT = advantages_BT * found.weights_BT
    policy_loss(logprobs_BT, proximal_BT, weighted_BT, keep, cliprange=0.2).loss.backward()

    tensors = (batch.logprobs_BT, batch.old_logprobs_BT, sampled_BT, advantages_BT)
    logprobs, proximal, sampled, advantages = (rows_of(x, keep) for x in tensors)
    weights, limited = reference.rollout_weights(proximal, sampled, level, **limits)
    assert_close(found.weights_BT[keep], [x for row in weights for x in row], atol=TOLERANCE)
    assert found.weights_BT[~keep].eq(1).all()
    assert found.limited_BT.sum() == limited
    products = [
        [w * a for w, a in zip(*rows, strict=True)]
        for rows in zip(weights, advantages, strict=True)
    ]
    slopes = reference.gradient(
        lambda x: reference.policy_loss(x, proximal, products, cliprange=0.2).total, logprobs
    )
    assert_rows(logprobs_BT.grad, keep, slopes)


def test_the_batches_reach_every_branch() -> None:
    """Otherwise agreement of the losses would say little about their clips."""
    batch = random_batch(torch.ones(5, 6, dtype=torch.bool), seed=0)
    actor = policy_loss(
        batch.logprobs_BT,
        batch.old_logprobs_BT,
        batch.values_BT,
        batch.keep_BT,
        cliprange=0.2,
        dual_clip=1.05,
    )
    critic = value_loss(
        batch.values_BT,
        batch.old_values_BT,
        batch.reference_logprobs_BT,
        batch.keep_BT,
        cliprange_value=0.2,
    )
    for level in ("token", "sequence", "geometric"):
        tensors = (batch.old_logprobs_BT, batch.reference_logprobs_BT, batch.keep_BT)
        pair = [x[:, :2] for x in tensors]  # longer products all lie beyond the limits
        found = rollout_weights(*pair, level=level, masks=True, cap=1.2, floor=0.8)
        assert 0.1 < found.limited_BT.double().mean() < 0.9
    assert 0.1 < actor.clipfrac.value() < 0.9
    assert 0.05 < actor.dual_clipfrac.value() < 0.9
    assert 0.1 < critic.value_clipfrac.value() < 0.9
    assert 0 < batch.ended_B.sum() < 5
