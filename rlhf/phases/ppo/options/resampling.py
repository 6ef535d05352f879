"""ppo.resampling_rounds: DAPO's dynamic sampling, https://arxiv.org/abs/2503.14476.

An estimator that compares the responses to one prompt learns nothing if all have the same score.
Such a prompt is replaced by another one, until the scores differ or the rounds are used up. Prompts
and random numbers are keyed by step and round, and each prompt is replaced alone: neither resuming
nor the number of ranks changes a response. Shapes: B = sequences of this rank.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from rlhf.base.stored_responses import join_rows
from rlhf.base.types import PromptBatch, Rollout, take_rows
from rlhf.phases.ppo.prompts import PromptLoader
from rlhf.phases.ppo.step_metrics import equal_group_mask


def sample_rollout(
    generate: Callable[[PromptBatch], Rollout],
    scores_of: Callable[[Rollout], Tensor],
    loader: PromptLoader,
    step: int,
) -> Rollout:
    """Return the scored responses of step ``step``, counted from 0, after all rounds.

    ``scores_of`` returns the scores (B,) that are compared.
    """
    context, ranks = loader.context, loader.context.ranks
    config, pad_id = context.config.ppo, context.tokenizer.pad_token_id
    rollout, size = generate(loader.batch(step)), config.responses_per_prompt
    if config.resampling_rounds:
        rollout = rollout._replace(replaced_B=torch.zeros_like(rollout.responses.ended_B))
    for number in range(1, config.resampling_rounds + 1):
        is_equal = equal_group_mask(scores_of(rollout).view(-1, size)).tolist()
        equal = [group for group, holds in enumerate(is_equal) if holds]
        # Every rank answers as many prompts as the rank that needs most, since all must take part
        # in the passes of sharded models; it drops what it does not need.
        most = int(ranks.max(torch.tensor(len(equal), device=ranks.device)))
        if most == 0:
            break
        others = [group for group, holds in enumerate(is_equal) if not holds]
        rows = [group * size + place for group in (equal + others)[:most] for place in range(size)]
        fresh = generate(take_rows(loader.batch(step, attempt=number), rows))
        fresh = fresh._replace(replaced_B=torch.ones_like(fresh.responses.ended_B))
        source = list(range(len(rollout.scores_B)))
        for place, row in enumerate(rows[: len(equal) * size]):
            source[row] = len(source) + place
        seconds = _add_seconds(rollout, fresh)
        rollout = take_rows(join_rows([rollout, fresh], pad_id=pad_id), source)
        rollout = rollout._replace(seconds=seconds)
    return rollout


def _add_seconds(rollout: Rollout, fresh: Rollout) -> dict[str, float]:
    """Return the seconds of both rollouts together, by part."""
    first, second = rollout.seconds or {}, fresh.seconds or {}
    return {name: first[name] + second[name] for name in first}
