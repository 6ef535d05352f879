"""The corpus beside PPO: its language-model loss in the actor's steps, and its perplexity.

InstructGPT (https://arxiv.org/abs/2203.02155, eq. 2) adds gamma * E[log pi(text)] to its objective,
so that what was learned before is not forgotten. Shapes: B = blocks, S = tokens of a block.
"""

from __future__ import annotations

import math

import torch

from rlhf.algorithms.sft import sft_loss
from rlhf.algorithms.streams import Shuffle, seed_for
from rlhf.config.checks import BatchPlan
from rlhf.data.collate import collate_sequences
from rlhf.data.corpus import PtxBlocks
from rlhf.metrics import Metrics, merge_metrics
from rlhf.phases.context import eval_batches, rows_of_rank
from rlhf.phases.ppo_models import add_gradient
from rlhf.phases.rlhf_engine import RLHFEngine
from rlhf.types import SequenceBatch


class PtxCorpus:
    """Blocks of token ids to learn from, in an endless shuffled pass."""

    def __init__(self, blocks: PtxBlocks, plan: BatchPlan, *, seed: int) -> None:
        self.plan = plan
        self._blocks = blocks.train
        self._shuffle = Shuffle(len(blocks.train), seed=seed_for(seed, "ptx", "shuffle"))

    def batch(self, update: int, batch_size: int) -> list[list[int]]:
        """The blocks of one optimiser step, over all ranks."""
        return [self._blocks[row] for row in self._shuffle.batch(update, batch_size)]


def learn_from_corpus(
    engine: RLHFEngine, corpus: PtxCorpus, *, update: int, coefficient: float
) -> Metrics:
    """Add coefficient * (mean loss per token) to the actor's gradient of one optimiser step."""
    plan = corpus.plan
    blocks = corpus.batch(update, plan.per_rank * engine.ranks.size)
    mine = rows_of_rank(blocks, engine.ranks)
    batches = [_collate(engine, mine[i : i + plan.micro]) for i in range(0, len(mine), plan.micro)]
    counts = torch.stack([batch.keep_BS[:, 1:].sum() for batch in batches])
    num_tokens = engine.ranks.sum(counts.sum())
    metrics: Metrics = {}
    for batch in batches:
        result = sft_loss(engine.models.language_logprobs(batch))
        add_gradient(engine.actor, coefficient * result.loss / num_tokens)
        metrics = merge_metrics(metrics, {"ppo/ptx_loss": result.mean_loss})
    return metrics


def corpus_perplexity(engine: RLHFEngine, blocks: list[list[int]]) -> float:
    """Perplexity of the actor on blocks of held-out text."""
    losses: Metrics = {}
    with engine.actor.evaluating():
        for rows, keep_B in eval_batches(
            len(blocks), batch_size=engine.plan.micro, ranks=engine.ranks
        ):
            batch = _collate(engine, [blocks[row] for row in rows])
            batch = batch._replace(keep_BS=batch.keep_BS & keep_B[:, None])
            result = sft_loss(engine.models.language_logprobs(batch))
            losses = merge_metrics(losses, {"loss": result.mean_loss})
    return math.exp(engine.ranks.reduce_metrics(losses)["loss"].value())


def _collate(engine: RLHFEngine, blocks: list[list[int]]) -> SequenceBatch:
    return collate_sequences(
        blocks, [0] * len(blocks), pad_id=engine.tokenizer.pad_token_id, device=engine.ranks.device
    )
