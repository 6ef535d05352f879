"""InstructGPT's mixture training: a language-model loss on a corpus, added to PPO's actor.

InstructGPT (https://arxiv.org/abs/2203.02155, eq. 2) adds gamma * E[log pi(text)] to the objective
so that the policy does not forget its pretraining. Shapes: B = blocks, S = tokens of a block.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import torch

from rlhf.algorithms.sft import sft_loss
from rlhf.base.errors import ConfigError
from rlhf.base.metrics import Metrics, merge_metrics, perplexity
from rlhf.base.random_streams import Shuffle, seed_for
from rlhf.base.types import SequenceBatch
from rlhf.config.batches import BatchPlan
from rlhf.config.choices import Phase
from rlhf.config.roles import Role
from rlhf.config.schema.run import RunConfig
from rlhf.data.collate import collate_sequences, eval_batches
from rlhf.options.ptx.corpus import PtxBlocks, build_ptx_blocks, reads_corpus
from rlhf.options.ptx.rules import ptx_batch_plan
from rlhf.phases.ppo.hooks import PpoHook
from rlhf.phases.ppo.loop import PPOTrainer
from rlhf.phases.ppo.models import Learner
from rlhf.phases.ppo.rlhf_engine import RLHFEngine
from rlhf.phases.shared.context import RunContext
from rlhf.phases.shared.policy_evaluation import HeldOutPrompts


class PtxCorpus:
    """Blocks of token ids that the actor learns from, in endless shuffled passes over them."""

    def __init__(self, blocks: PtxBlocks, plan: BatchPlan, *, seed: int) -> None:
        self.plan = plan
        self._blocks = blocks.train
        self._shuffle = Shuffle(len(blocks.train), seed=seed_for(seed, "ptx", "shuffle"))

    def blocks_of_update(self, update: int, batch_size: int) -> list[list[int]]:
        """Return the blocks of one optimizer step, over all ranks."""
        return [self._blocks[row] for row in self._shuffle.batch_indices(update, batch_size)]


def load_corpus_blocks(context: RunContext) -> PtxBlocks | None:
    """Return the corpus in blocks as long as PPO's sequences; None if no key uses a corpus."""
    config = context.config
    if not reads_corpus(config.ppo, config.data):
        return None
    return build_ptx_blocks(
        config.data,
        context.parts[Phase.sft],
        context.tokenizer,
        block_tokens=config.rollout.max_prompt_tokens + config.token_limit_after_prompt[1],
        seed=config.data_seed,
        learns=config.ppo.ptx_coef > 0,
    )


def corpus_perplexity(engine: RLHFEngine, blocks: list[list[int]]) -> float:
    """Return the actor's perplexity on blocks of held-out text."""
    losses: Metrics = {}
    with engine.actor.evaluating():
        for rows, keep_B in eval_batches(
            len(blocks), batch_size=engine.plan.micro, ranks=engine.ranks
        ):
            batch = _collate(engine, [blocks[row] for row in rows])
            batch = batch._replace(keep_BS=batch.keep_BS & keep_B[:, None])
            result = sft_loss(engine.models.actor_logprobs(batch))
            losses = merge_metrics(losses, {"loss": result.mean_loss})
    return perplexity(engine.ranks.reduce_metrics(losses)["loss"].value())


def _collate(engine: RLHFEngine, blocks: list[list[int]]) -> SequenceBatch:
    return collate_sequences(
        blocks, [0] * len(blocks), pad_id=engine.tokenizer.pad_token_id, device=engine.ranks.device
    )


class CorpusHook(PpoHook):
    """A hook that trains the actor on ``corpus``, and measures perplexity on ``held_out`` blocks.

    The loss on the corpus has the weight ppo.ptx_coef.

    Raises:
        ConfigError: if ppo.ptx_coef is set and there is no corpus.
    """

    def __init__(
        self,
        config: RunConfig,
        corpus: PtxCorpus | None = None,
        held_out: list[list[int]] | None = None,
    ) -> None:
        super().__init__(config)
        if config.ppo.ptx_coef and corpus is None:
            raise ConfigError(
                f"ppo.ptx_coef={config.ppo.ptx_coef}: there is no corpus to learn from; give "
                "PPOTrainer a CorpusHook with a corpus, or set ppo.ptx_coef=0"
            )
        self._corpus = corpus if config.ppo.ptx_coef else None
        self._held_out = (held_out or [])[: config.ppo.ptx_eval_blocks]

    @classmethod
    def build(cls, config: RunConfig, context: RunContext | None) -> Self:
        """Build the hook; with a ``context``, load the corpus if a key of the run uses it."""
        blocks = None if context is None else load_corpus_blocks(context)
        if context is None or blocks is None:
            return cls(config)
        corpus = None
        if config.ppo.ptx_coef:
            corpus = PtxCorpus(blocks, ptx_batch_plan(config), seed=config.seed)
        return cls(config, corpus, blocks.eval)

    def add_gradient(self, trainer: PPOTrainer, learners: Sequence[Learner]) -> Metrics:
        """Backpropagate the corpus loss if ``learners`` include the actor; return its metrics."""
        if self._corpus is None or all(each.role is not Role.actor for each in learners):
            return {}
        engine, corpus, micro = trainer.engine, self._corpus, self._corpus.plan.micro
        num_blocks = corpus.plan.per_rank * engine.ranks.size
        blocks = engine.ranks.own_rows(corpus.blocks_of_update(trainer.updates_done, num_blocks))
        batches = [_collate(engine, blocks[i : i + micro]) for i in range(0, len(blocks), micro)]
        counts = torch.stack([batch.keep_BS[:, 1:].sum() for batch in batches])
        num_tokens = engine.ranks.sum(counts.sum())
        metrics: Metrics = {}
        for batch in batches:
            result = sft_loss(engine.models.actor_logprobs(batch))
            engine.actor.backward(self.config.ppo.ptx_coef * result.loss / num_tokens)
            metrics = merge_metrics(metrics, {"ppo/ptx_loss": result.mean_loss})
        return metrics

    def results(self, engine: RLHFEngine, _: HeldOutPrompts, when: str) -> dict[str, Any]:
        """Return the perplexity on held-out blocks; {} if there are none."""
        if not self._held_out:
            return {}
        return {f"corpus_perplexity_{when}": corpus_perplexity(engine, self._held_out)}
