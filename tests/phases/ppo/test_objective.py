"""The actor's loss and its gradient, row by row of a table, against slow loops in float64.

The slopes of a loop are central differences. A value that a loss takes from the policy "without
gradient" comes, in its loop, from ``still``: log-probabilities of the policy that do not move.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlhf.base.ranks import Ranks
from rlhf.config.choices import KlEstimator, KlPlacement
from rlhf.config.schema.ppo import LossAggregation, SurrogateName
from rlhf.phases.ppo.hooks import build_hooks
from rlhf.phases.ppo.objective import SURROGATES, Aggregation, MicroBatch, Objective, learned_mask
from rlhf.phases.shared.scoring import ResponseLogprobs
from tests.algorithms import loop_reference as reference
from tests.algorithms.loop_reference import Rows
from tests.algorithms.padded_batches import assert_close, quick
from tests.algorithms.test_against_reference import Batch, assert_rows, batches, rows_of
from tests.phases.ppo.ppo_pieces import engine_config

MAX_TOKENS, KL_COEF, ENTROPY_COEF, MAX_KL = 9, 0.3, 0.2, 0.05
# A loop of the policy, the policy still, the old policy, the sampler and the advantages.
Loop = Callable[[Rows, Rows, Rows, Rows, Rows], float]


def products(rows: Rows, others: Rows) -> Rows:
    pairs = (zip(*each, strict=True) for each in zip(rows, others, strict=True))
    return [[x * y for x, y in each] for each in pairs]


def clip(policy: Rows, _: Rows, old: Rows, __: Rows, advantages: Rows) -> float:
    return reference.policy_loss(policy, old, advantages, **CLIP).total


def clip_at_once(policy: Rows, _: Rows, old: Rows, __: Rows, advantages: Rows) -> float:
    return reference.policy_loss(policy, old, advantages, **AT_ONCE).total


def gspo(policy: Rows, still: Rows, old: Rows, _: Rows, advantages: Rows) -> float:
    return reference.gspo_token_loss(policy, still, old, advantages, **GSPO)


def cispo(policy: Rows, still: Rows, old: Rows, _: Rows, advantages: Rows) -> float:
    return reference.cispo_loss(policy, still, old, advantages, **CISPO)


def dppo(divergence: str, *policies: Rows) -> float:
    return reference.dppo_loss(*policies, divergence, limits=(0.02, 0.05))


def mask(
    loop: Loop, policy: Rows, still: Rows, old: Rows, sampled: Rows, advantages: Rows
) -> float:
    masked = reference.off_policy_mask(still, sampled, advantages, max_kl=MAX_KL)
    kept = [[float(not each) for each in row] for row in masked]
    return loop(policy, still, old, sampled, products(advantages, kept))


class Case(NamedTuple):
    """A row of the table: keys of PPO, and the loop of the surrogate that they select."""

    keys: dict[str, Any]
    loop: Loop = clip


GSPO = {"cliprange": 0.05, "cliprange_high": 0.1}
CISPO = {"cliprange_high": 0.2}
CLIP = {"cliprange": 0.2, "cliprange_high": 0.3, "dual_clip": 1.05}
AT_ONCE = {"cliprange": 0.2, "cliprange_high": 0.0}  # zero is a range too
DPPO = {"cliprange": 0.02, "cliprange_high": 0.05}
SURROGATE_CASES = {
    name: Case({**keys, "surrogate": SurrogateName(name)}, loop)
    for name, keys, loop in (
        ("clip", CLIP, clip),
        ("gspo", GSPO, gspo),
        ("cispo", CISPO, cispo),
        ("dppo_tv", DPPO, partial(dppo, "tv")),
        ("dppo_kl", DPPO, partial(dppo, "kl")),
    )
}
MASKED_CASES = {
    f"{name}, off_policy_mask_kl": Case({**keys, "off_policy_mask_kl": MAX_KL}, partial(mask, loop))
    for name, (keys, loop) in SURROGATE_CASES.items()
}
KL_CASES = {
    name: Case({**CLIP, "kl_placement": KlPlacement.loss, "kl_estimator": KlEstimator(name)})
    for name in ("k2", "k3", "k3_ratio")
}
TABLE = {
    **SURROGATE_CASES,
    **MASKED_CASES,
    **KL_CASES,
    "clip at once": Case(AT_ONCE, clip_at_once),
    "missing_end_mask": Case({**CLIP, "missing_end_mask": True, "entropy_coef": ENTROPY_COEF}),
    "entropy_coef": Case({**CLIP, "entropy_coef": ENTROPY_COEF}),
}


def slow_loss(
    case: Case, aggregation: str, batch: Batch, sampled: Rows, policy: Rows, entropy: Rows
) -> float:
    """The actor's loss, one response after another."""
    _, old_BT, still_BT, other_BT, _, advantages_BT, *_ = batch
    tensors = (still_BT, old_BT, advantages_BT, other_BT)
    still, old, advantages, other = (rows_of(x_BT, batch.keep_BT) for x_BT in tensors)
    learns_all, total = "missing_end_mask" not in case.keys, 0.0
    learned = [row for row in range(len(old)) if learns_all or batch.ended_B[row]]
    divisors = {
        "token_mean": sum(len(old[row]) for row in learned),
        "fixed_length": len(old) * MAX_TOKENS,
    }
    for row in learned:
        one = slice(row, row + 1)
        loss = case.loop(policy[one], still[one], old[one], sampled[one], advantages[one])
        loss -= case.keys.get("entropy_coef", 0.0) * math.fsum(entropy[row])
        if estimator := case.keys.get("kl_estimator"):
            kl = reference.kl_per_token(policy[one], other[one], estimator, sampled=sampled[one])
            loss += KL_COEF * math.fsum(kl[0])
        total += loss / divisors.get(aggregation, len(old) * len(old[row]))  # or sequence_mean
    return total


@pytest.mark.parametrize("name", TABLE)
@quick
@given(batch=batches, aggregation=st.sampled_from(LossAggregation))
def test_loss_and_gradient_are_those_of_a_loop(
    name: str, batch: Batch, aggregation: LossAggregation
) -> None:
    # DPPO reads probabilities, so no log-probability is above 0.
    logprobs_BT, old_BT = (-x.abs() - 0.01 for x in (batch.logprobs_BT, batch.old_logprobs_BT))
    batch = batch._replace(logprobs_BT=logprobs_BT, old_logprobs_BT=old_BT)
    config = engine_config()
    ppo = replace(config.ppo, loss_aggregation=aggregation, **TABLE[name].keys)
    rollout: Any = SimpleNamespace(responses=batch)
    surrogate = SURROGATES[ppo.surrogate]
    for hook in build_hooks(replace(config, ppo=ppo)):
        surrogate = hook.change_surrogate(surrogate)
    nothing: Any = None
    keep_BT = learned_mask(ppo, rollout)
    mean = Aggregation.build_for_mini_batch(ppo, keep_BT, Ranks(), max_tokens=MAX_TOKENS)
    objective = Objective(ppo, surrogate, KL_COEF, ppo.entropy_coef, mean, False)
    sampled_BT = old_BT * (1 + 0.2 * batch.old_values_BT.tanh())  # an older policy
    others = (old_BT, sampled_BT, batch.reference_logprobs_BT, nothing, batch.values_BT, nothing)
    moved = [each.clone().requires_grad_() for each in (logprobs_BT, batch.old_values_BT)]
    loss, _ = objective.actor_loss(ResponseLogprobs(*moved), MicroBatch(nothing, keep_BT, *others))
    slopes = torch.autograd.grad(loss, moved, materialize_grads=True)

    policy, entropy = (rows_of(each.detach(), batch.keep_BT) for each in moved)
    sampled = rows_of(sampled_BT, batch.keep_BT)
    expected = partial(slow_loss, TABLE[name], aggregation, batch, sampled)
    assert_close(loss.detach(), expected(policy, entropy))
    by_policy = reference.gradient(lambda rows: expected(rows, entropy), policy)
    by_entropy = reference.gradient(lambda rows: expected(policy, rows), entropy)
    for found, rows in zip(slopes, (by_policy, by_entropy), strict=True):
        assert_rows(found, batch.keep_BT, rows)
