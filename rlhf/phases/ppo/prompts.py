"""Prompts of PPO's steps, with the random numbers from which their responses are sampled.

Shapes: B = sequences of this rank, T = response tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from rlhf.base.random_streams import Shuffle, random_stream, seed_for
from rlhf.base.ranks import Ranks
from rlhf.base.stored_responses import join_rows
from rlhf.base.types import Extras, PromptBatch, Rollout, take_rows
from rlhf.config.choices import Phase
from rlhf.config.schema.run import RunConfig
from rlhf.data.collate import collate_prompts
from rlhf.data.records import record_seeds
from rlhf.phases.ppo.step_metrics import equal_group_mask
from rlhf.phases.shared.context import RunContext

if TYPE_CHECKING:
    from datasets import Dataset


class StepPrompts(NamedTuple):
    """The prompts of one step, of all ranks, each once."""

    ids: list[list[int]]
    texts: list[str]
    columns: Extras  # of each prompt, the dataset columns that rewards read
    seeds: list[int] | None = None  # of their episodes; None: no environment


class PromptLoader:
    """A loader of each step's prompts, from an endless sequence of shuffled passes."""

    def __init__(self, context: RunContext, examples: Dataset) -> None:
        self.context = context
        self._examples = examples
        self._records = context.parts[Phase.ppo].train
        self._shuffles: dict[int, Shuffle] = {}  # by attempt

    def prompts_of_all_ranks(self, step: int, *, attempt: int = 0) -> StepPrompts:
        """Return the prompts of step ``step``, counted from 0."""
        ppo = self.context.config.ppo
        if attempt not in self._shuffles:
            seed = seed_for(self._seed(attempt), "ppo", "shuffle")
            self._shuffles[attempt] = Shuffle(len(self._examples), seed=seed)
        num_prompts = ppo.rollout_batch_size // ppo.responses_per_prompt
        rows = self._shuffles[attempt].batch(step, num_prompts)
        chosen = self._examples[rows]
        records = [self._records[row] for row in chosen["row"]]
        return StepPrompts(
            chosen["ids"],
            [each.prompt or "" for each in records],
            [each.columns or {} for each in records],
            record_seeds(records),
        )

    def batch(self, step: int, *, attempt: int = 0) -> PromptBatch:
        """Return this rank's prompts of step ``step``, counted from 0.

        Each further ``attempt`` has other prompts and random numbers for the same step.
        """
        context = self.context
        return shard_prompt_batch(
            self.prompts_of_all_ranks(step, attempt=attempt),
            step=step,
            config=replace(context.config, seed=self._seed(attempt)),
            ranks=context.ranks,
            pad_id=context.tokenizer.pad_token_id,
        )

    def _seed(self, attempt: int) -> int:
        seed = self.context.config.seed
        return seed_for(seed, "attempt", attempt) if attempt else seed


def shard_prompt_batch(
    prompts: StepPrompts, *, step: int, config: RunConfig, ranks: Ranks, pad_id: int
) -> PromptBatch:
    """Return this rank's share of the prompts of step ``step``, counted from 0.

    Each prompt is repeated ``ppo.responses_per_prompt`` times in a row. Random numbers are drawn
    for all ranks before they are divided, so that a response does not depend on the number of
    ranks.
    """
    rows = [row for row in range(len(prompts.ids)) for _ in range(config.ppo.responses_per_prompt)]
    draws_BT = torch.rand(
        len(rows),
        config.max_policy_tokens,
        generator=random_stream(config.seed, "sampling", step),
    )
    mine = ranks.share(rows)
    batch = collate_prompts(
        [prompts.ids[row] for row in mine],
        [prompts.texts[row] for row in mine],
        draws_BT[ranks.share(range(len(rows)))],
        columns=[prompts.columns[row] for row in mine],
        pad_id=pad_id,
        device=ranks.device,
    )
    own = None if prompts.seeds is None else [prompts.seeds[row] for row in mine]
    return batch._replace(step=step + 1, seeds=own)


def sample_rollout(
    generate: Callable[[PromptBatch], Rollout],
    scores_of: Callable[[Rollout], Tensor],
    loader: PromptLoader,
    step: int,
) -> Rollout:
    """Return the scored responses of step ``step``, counted from 0, after all rounds.

    ppo.resampling_rounds is DAPO's dynamic sampling, https://arxiv.org/abs/2503.14476: an estimator
    that compares the responses to one prompt learns nothing if all have the same score, so such a
    prompt is replaced by another one, until the scores differ or the rounds are used up. Prompts
    and random numbers are keyed by step and round, and each prompt is replaced alone: neither
    resuming nor the number of ranks changes a response. ``scores_of`` returns the scores (B,) that
    are compared.
    """
    context, ranks = loader.context, loader.context.ranks
    config, pad_id = context.config.ppo, context.tokenizer.pad_token_id
    rollout, size = generate(loader.batch(step)), config.responses_per_prompt
    if config.resampling_rounds:
        rollout = _with_replaced_share(rollout, 0.0)
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
        fresh = _with_replaced_share(fresh, 1.0)
        source = list(range(len(rollout.scores_B)))
        for place, row in enumerate(rows[: len(equal) * size]):
            source[row] = len(source) + place
        seconds = _add_seconds(rollout, fresh)
        rollout = take_rows(join_rows([rollout, fresh], pad_id=pad_id), source)
        rollout = rollout._replace(seconds=seconds)
    return rollout


def _with_replaced_share(rollout: Rollout, share: float) -> Rollout:
    """Return ``rollout`` with a share of 1 if its prompts were sampled in place of others."""
    share_B = torch.full_like(rollout.scores_B, share)
    return rollout._replace(measures={**rollout.measures, "replaced_share": share_B})


def _add_seconds(rollout: Rollout, fresh: Rollout) -> dict[str, float]:
    """Return the seconds of both rollouts together, by part."""
    first, second = rollout.seconds or {}, fresh.seconds or {}
    return {name: first[name] + second[name] for name in first}
