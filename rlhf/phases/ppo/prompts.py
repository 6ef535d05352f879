"""Prompts of PPO's steps, with the random numbers from which their responses are sampled.

Shapes: B = sequences of this rank, T = response tokens.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import torch

from rlhf.base.random_streams import Shuffle, random_stream, seed_for
from rlhf.base.ranks import Ranks
from rlhf.base.types import Extras, PromptBatch
from rlhf.config.choices import Phase
from rlhf.config.schema.run import RunConfig
from rlhf.data.collate import collate_prompts
from rlhf.data.records import seeds_of_records
from rlhf.phases.shared.context import RunContext

if TYPE_CHECKING:
    from datasets import Dataset


class StepPrompts(NamedTuple):
    """The prompts of all ranks in one PPO step, before each prompt is repeated."""

    ids: list[list[int]]
    texts: list[str]
    columns: Extras  # for each prompt, the dataset columns that rewards read
    seeds: list[int] | None = None  # seeds of the prompts' episodes; None: no environment


class PromptLoader:
    """A loader of each step's prompts, from endless passes over the data, each reshuffled."""

    def __init__(self, context: RunContext, examples: Dataset) -> None:
        self.context = context
        self._examples = examples
        self._records = context.parts[Phase.ppo].train
        self._shuffles: dict[int, Shuffle] = {}  # one shuffle per attempt

    def prompts_of_all_ranks(self, step: int, *, attempt: int = 0) -> StepPrompts:
        """Return the prompts of all ranks in step ``step``; arguments as in ``own_prompts``."""
        ppo = self.context.config.ppo
        if attempt not in self._shuffles:
            seed = seed_for(self._seed_of_attempt(attempt), "ppo", "shuffle")
            self._shuffles[attempt] = Shuffle(len(self._examples), seed=seed)
        num_prompts = ppo.rollout_batch_size // ppo.responses_per_prompt
        rows = self._shuffles[attempt].batch_indices(step, num_prompts)
        chosen = self._examples[rows]
        records = [self._records[row] for row in chosen["row"]]
        return StepPrompts(
            chosen["ids"],
            [each.prompt or "" for each in records],
            [each.columns or {} for each in records],
            seeds_of_records(records),
        )

    def own_prompts(self, step: int, *, attempt: int = 0) -> PromptBatch:
        """Return this rank's prompts of step ``step``, counted from 0.

        A higher ``attempt`` selects other prompts and random numbers for the same step.
        """
        context = self.context
        return shard_prompt_batch(
            self.prompts_of_all_ranks(step, attempt=attempt),
            step=step,
            config=replace(context.config, seed=self._seed_of_attempt(attempt)),
            ranks=context.ranks,
            pad_id=context.tokenizer.pad_token_id,
        )

    def _seed_of_attempt(self, attempt: int) -> int:
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
    generator = random_stream(config.seed, "sampling", step)
    draws_BT = torch.rand(len(rows), config.max_policy_tokens, generator=generator)
    own_rows = ranks.own_rows(rows)
    batch = collate_prompts(
        [prompts.ids[row] for row in own_rows],
        [prompts.texts[row] for row in own_rows],
        draws_BT[ranks.own_rows(range(len(rows)))],
        columns=[prompts.columns[row] for row in own_rows],
        pad_id=pad_id,
        device=ranks.device,
    )
    own_seeds = None if prompts.seeds is None else [prompts.seeds[row] for row in own_rows]
    return batch._replace(step=step + 1, seeds=own_seeds)
