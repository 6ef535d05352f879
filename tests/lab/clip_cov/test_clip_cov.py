"""Clip-Cov: which tokens it leaves out, against a slow loop, and their gradient."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from rlhf.algorithms.masking import masked_sum
from rlhf.base.metrics import Metric, Moments
from rlhf.base.random_streams import random_stream
from rlhf.base.ranks import Ranks
from rlhf.base.types import Responses, Rollout
from rlhf.config.schema.run import RunConfig
from rlhf.phases.ppo.hooks import build_hooks
from rlhf.phases.ppo.objective import SURROGATES, SurrogateInputs, learned_mask
from rlhf.phases.ppo.targets import TargetMaker, Targets
from tests.algorithms import loop_reference as reference
from tests.algorithms.loop_reference import Row
from tests.algorithms.padded_batches import keep_of, normal
from tests.algorithms.test_against_reference import assert_rows, rows_of
from tests.phases.ppo.ppo_pieces import engine_config
from tests.phases.ppo.test_targets import rollout_of

LENGTHS = [6, 1, 4, 6, 3, 5, 2, 6]
KEYS = {"clip_cov_low": 0.2, "clip_cov_high": 1.5}


class BesideAnother(Ranks):
    """Rank 1, beside a rank of 10 tokens, whose numbers are 0.7."""

    def reduce_metrics(self, metrics: Mapping[str, Metric]) -> Mapping[str, Metric]:
        others = Moments.of(torch.full((10,), 0.7, dtype=torch.float64))
        return {name: each + others for name, each in metrics.items()}


def some_rollout(seed: int, lengths: Sequence[int] = LENGTHS) -> Rollout:
    """Random scores and log-probs in float64, nan behind each response."""
    keep_BT = keep_of(lengths, max(lengths))
    plain = rollout_of(*(3 * normal(len(lengths), seed=seed)).tolist())
    ended_B = torch.arange(len(lengths)) % 3 > 0
    responses = Responses(torch.zeros_like(keep_BT).long(), keep_BT, ended_B)
    logprobs_BT = (-2 * normal(*keep_BT.shape, seed=seed + 1).abs()).masked_fill(~keep_BT, math.nan)
    values_BT = torch.zeros_like(logprobs_BT)
    prompts = plain.prompts._replace(step=seed)
    scores_B = plain.scores_B.double()
    return Rollout(prompts, responses, logprobs_BT, logprobs_BT, values_BT, scores_B)


def config_of(**keys: Any) -> RunConfig:
    config = engine_config()
    return replace(config, ppo=replace(config.ppo, **KEYS, **keys))


def made(config: RunConfig, rollout: Rollout, ranks: Ranks) -> Targets:
    return TargetMaker(config.ppo, ranks, {}, build_hooks(config)).make(rollout, kl_ctl=0.0)


def slow_choice(
    logprobs: Row, advantages: Row, *, beside: Row, ratio: float, draws: torch.Generator
) -> tuple[list[bool], float]:
    """The tokens that are left out, and the mean covariance; ``beside`` is of the other rank."""
    means = [math.fsum(x + beside) / len(x + beside) for x in (logprobs, advantages)]
    pairs = zip(logprobs, advantages, strict=True)
    covariances = [(p - means[0]) * (a - means[1]) for p, a in pairs]
    high = [n for n, covariance in enumerate(covariances) if 0.2 < covariance < 1.5]
    order = torch.randperm(len(high), generator=draws).tolist()
    chosen = {high[place] for place in order[: max(1, math.floor(ratio * len(logprobs)))]}
    return [n in chosen for n in range(len(logprobs))], math.fsum(covariances) / len(covariances)


@pytest.mark.parametrize("ranks", [Ranks(), BesideAnother(rank=1, size=2)])
@pytest.mark.parametrize("masks", [False, True])
@pytest.mark.parametrize("ratio", [1e-4, 0.1, 1.0])
@pytest.mark.parametrize("seed", range(3))
def test_the_tokens_left_out_are_those_of_a_loop_and_have_no_slope(
    ratio: float, masks: bool, ranks: Ranks, seed: int
) -> None:
    rollout, config = some_rollout(seed), config_of(clip_cov_ratio=ratio, missing_end_mask=masks)
    keep_BT, old_BT = learned_mask(config.ppo, rollout), rollout.logprobs_BT
    plain_BT = made(config_of(missing_end_mask=masks), rollout, ranks).advantages.advantages_BT
    found = made(config, rollout, ranks)
    chosen, covariance = slow_choice(
        old_BT[keep_BT].tolist(),
        plain_BT[keep_BT].tolist(),
        beside=[0.7] * 10 * ranks.rank,
        ratio=ratio,
        draws=random_stream(1, "clip_cov", str(seed), ranks.rank),
    )
    assert any(chosen)
    left_out_BT = torch.zeros_like(keep_BT).masked_scatter(keep_BT, torch.tensor(chosen))
    used_BT = found.advantages.advantages_BT
    assert torch.equal(used_BT, plain_BT.masked_fill(left_out_BT, 0.0))
    assert torch.equal(found.raw.advantages_BT, found.advantages.returns_BT), "values are 0"
    assert found.metrics["ppo/covariance"].value() == pytest.approx(covariance)
    share = sum(chosen) / len(chosen)
    assert found.metrics["ppo/clip_cov_share"].value() == pytest.approx(share)

    policy_BT = (old_BT + 0.2 * normal(*keep_BT.shape, seed=seed)).requires_grad_()
    inputs = SurrogateInputs(policy_BT, old_BT, used_BT, keep_BT, old_BT)
    loss, _ = SURROGATES[config.ppo.surrogate](inputs, config.ppo, masked_sum)
    (slopes_BT,) = torch.autograd.grad(loss.loss, policy_BT)
    tensors = (policy_BT.detach(), old_BT, plain_BT.masked_fill(left_out_BT, 0.0))
    policy, old, advantages = (rows_of(x_BT, keep_BT) for x_BT in tensors)
    slopes = reference.gradient(
        lambda rows: reference.policy_loss(rows, old, advantages, cliprange=0.2).total, policy
    )
    assert_rows(slopes_BT, keep_BT, slopes)
    assert not slopes_BT[left_out_BT].any()


def test_the_draw_is_keyed_by_seed_step_and_rank() -> None:
    """Another draw with another key, and the same again as after a resume."""
    config, drawn = config_of(clip_cov_ratio=0.2), []
    for seed, step, rank in ((1, 1, 0), (1, 1, 0), (2, 1, 0), (1, 2, 0), (1, 1, 1)):
        rollout = some_rollout(0)
        rollout = rollout._replace(prompts=rollout.prompts._replace(step=step))
        found = made(replace(config, seed=seed), rollout, Ranks(rank, 1))
        drawn.append(tuple((found.advantages.advantages_BT == 0).flatten().tolist()))
    assert drawn[0] == drawn[1]
    assert len(set(drawn)) == 4


def test_the_share_of_tokens_is_exact() -> None:
    """The product of the nearest binary numbers, 0.58 * 50, is below 29."""
    config = config_of(clip_cov_ratio=0.58)
    config = replace(config, ppo=replace(config.ppo, clip_cov_low=-1e9, clip_cov_high=1e9))
    found = made(config, some_rollout(0, [10] * 5), Ranks())
    assert found.metrics["ppo/clip_cov_share"].value() == pytest.approx(0.58)
