"""Prompts of PPO's steps, with the random numbers from which their responses are sampled."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from rlhf.base.random_streams import Shuffle, random_stream, seed_for
from rlhf.base.ranks import Ranks
from rlhf.base.types import Extras, PromptBatch
from rlhf.config.choices import Phase
from rlhf.config.schema.run import RunConfig
from rlhf.data.batching import rows_of_this_rank
from rlhf.data.collate import collate_prompts
from rlhf.data.records import episode_seeds
from rlhf.phases.shared.context import RunContext

if TYPE_CHECKING:
    from datasets import Dataset


class PromptLoader:
    """A loader of each step's prompts, from an endless sequence of shuffled passes."""

    def __init__(self, context: RunContext, examples: Dataset) -> None:
        self.context = context
        self._examples = examples
        self._records = context.parts[Phase.ppo].train
        self._shuffles: dict[int, Shuffle] = {}  # by attempt

    def batch(self, step: int, *, attempt: int = 0) -> PromptBatch:
        """Return this rank's prompts of step ``step``, counted from 0.

        Each further ``attempt`` has other prompts and random numbers for the same step.
        """
        context, config = self.context, self.context.config
        if attempt:
            config = replace(config, seed=seed_for(config.seed, "attempt", attempt))
        if attempt not in self._shuffles:
            seed = seed_for(config.seed, "ppo", "shuffle")
            self._shuffles[attempt] = Shuffle(len(self._examples), seed=seed)
        num_prompts = config.ppo.rollout_batch_size // config.ppo.responses_per_prompt
        rows = self._shuffles[attempt].batch(step, num_prompts)
        chosen = self._examples[rows]
        records = [self._records[row] for row in chosen["row"]]
        return shard_prompt_batch(
            chosen["ids"],
            [each.prompt or "" for each in records],
            [each.columns or {} for each in records],
            episode_seeds(records),
            step=step,
            config=config,
            ranks=context.ranks,
            pad_id=context.tokenizer.pad_token_id,
        )


def shard_prompt_batch(
    ids: list[list[int]],
    texts: list[str],
    columns: Extras,
    seeds: list[int] | None = None,
    *,
    step: int,
    config: RunConfig,
    ranks: Ranks,
    pad_id: int,
) -> PromptBatch:
    """Return this rank's share of the prompts of one step, given the prompts of all ranks.

    ``columns`` has, for each prompt, the values of the dataset columns that rewards read, and
    ``seeds`` the seeds of its episode with an environment.

    Each prompt is repeated ``ppo.responses_per_prompt`` times in a row. Random numbers are drawn
    for all ranks before they are divided, so that a response does not depend on the number of
    ranks.
    """
    rows = [row for row in range(len(ids)) for _ in range(config.ppo.responses_per_prompt)]
    draws_BT = torch.rand(
        len(rows),
        config.max_policy_tokens,
        generator=random_stream(config.seed, "sampling", step),
    )
    mine = rows_of_this_rank(rows, ranks)
    prompts = collate_prompts(
        [ids[row] for row in mine],
        [texts[row] for row in mine],
        draws_BT[rows_of_this_rank(range(len(rows)), ranks)],
        columns=[columns[row] for row in mine],
        pad_id=pad_id,
        device=ranks.device,
    )
    own = None if seeds is None else [seeds[row] for row in mine]
    return prompts._replace(step=step + 1, seeds=own)
