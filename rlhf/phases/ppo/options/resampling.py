"""ppo.resampling_rounds: DAPO's dynamic sampling, https://arxiv.org/abs/2503.14476 section 3.2.

An estimator that compares the responses to one prompt learns nothing if all have the same score.
Such a prompt is replaced by another one, until the scores differ or the rounds are used up. Prompts
and random numbers are keyed by step and round, and each prompt is replaced alone: neither resuming
nor the number of ranks changes a response. Shapes: B = sequences of this rank, T = response tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from rlhf.algorithms.advantages import clip_scores
from rlhf.base.types import Batch, PromptBatch, Rollout, take_rows
from rlhf.config.schema.ppo import PpoConfig
from rlhf.phases.ppo.prompts import PromptLoader


def sample_rollout(
    generate: Callable[[PromptBatch], Rollout], loader: PromptLoader, step: int
) -> Rollout:
    """Return the scored responses of step ``step``, counted from 0, after all rounds."""
    config, ranks = loader.context.config.ppo, loader.context.ranks
    rollout, size = generate(loader.batch(step)), config.responses_per_prompt
    if config.resampling_rounds:
        rollout = rollout._replace(replaced_B=torch.zeros_like(rollout.responses.ended_B))
    for number in range(1, config.resampling_rounds + 1):
        is_equal = equal_group_mask(rollout, config).tolist()
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
        needed = len(equal) * size
        seconds = _add_seconds(rollout, fresh)
        rollout = _put_rows(rollout, rows[:needed], take_rows(fresh, list(range(needed))))
        rollout = rollout._replace(seconds=seconds)
    return rollout


def equal_group_mask(rollout: Rollout, config: PpoConfig) -> Tensor:
    """Return a mask, one entry per prompt: all its responses have the same score.

    A missing end counts in the score, as it does in the rewards.
    """
    scores_B = clip_scores(
        rollout.scores_B,
        rollout.responses.ended_B,
        clip=None,
        missing_end_penalty=config.missing_end_penalty,
        missing_end_score=config.missing_end_score,
    )
    scores_GK = scores_B.view(-1, config.responses_per_prompt)
    return (scores_GK == scores_GK[:, :1]).all(dim=1)


def _put_rows(batch: Batch, rows: list[int], new: Batch, *, pads_left: bool = False) -> Batch:
    """Return ``batch``, a named tuple, with ``new`` in place of ``rows``, padded to one width."""
    parts: list[Any] = []
    for old, part in zip(batch, new, strict=True):
        if isinstance(old, Tensor) and isinstance(part, Tensor):
            parts.append(_put_tensor_rows(old, rows, part, pads_left=pads_left))
        elif isinstance(old, tuple) and isinstance(part, tuple):
            parts.append(_put_rows(old, rows, part, pads_left=isinstance(old, PromptBatch)))
        elif isinstance(old, list) and isinstance(part, list):
            by_row = dict(zip(rows, part, strict=True))
            parts.append([by_row.get(row, value) for row, value in enumerate(old)])
        else:
            parts.append(old)
    return type(batch)(*parts)


def _put_tensor_rows(old: Tensor, rows: list[int], new: Tensor, *, pads_left: bool) -> Tensor:
    """Return ``old`` with ``new`` in place of ``rows``; both are padded with 0 to one width."""
    if old.dim() > 1:
        width = max(old.shape[1], new.shape[1])
        old, new = (
            pad(each, (width - each.shape[1], 0) if pads_left else (0, width - each.shape[1]))
            for each in (old, new)
        )
    return old.index_copy(0, torch.tensor(rows, dtype=torch.long, device=old.device), new)


def _add_seconds(rollout: Rollout, fresh: Rollout) -> dict[str, float]:
    """Return the seconds of both rollouts together, by part."""
    first, second = rollout.seconds or {}, fresh.seconds or {}
    return {name: first[name] + second[name] for name in first}
