"""The hook that adds the gradient of a corpus loss to PPO's, and measures corpus perplexity."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

from rlhf.base.errors import ConfigError
from rlhf.base.metrics import Metrics
from rlhf.config.roles import Role
from rlhf.config.schema.run import RunConfig
from rlhf.options.ptx.ptx import (
    PtxCorpus,
    add_corpus_gradient,
    build_ptx_corpus,
    corpus_perplexity,
    load_corpus_blocks,
)
from rlhf.phases.ppo.hooks import PpoHook
from rlhf.phases.ppo.loop import PPOTrainer
from rlhf.phases.ppo.models import Learner
from rlhf.phases.ppo.rlhf_engine import RLHFEngine
from rlhf.phases.shared.context import RunContext
from rlhf.phases.shared.policy_evaluation import HeldOutPrompts


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
        return cls(config, build_ptx_corpus(context, blocks), blocks.eval)

    def add_gradient(self, trainer: PPOTrainer, learners: Sequence[Learner]) -> Metrics:
        """Backpropagate the corpus loss if ``learners`` include the actor; return its metrics."""
        if self._corpus is None or all(each.role is not Role.actor for each in learners):
            return {}
        coefficient, update = self.config.ppo.ptx_coef, trainer.updates_done
        return add_corpus_gradient(trainer.engine, self._corpus, coefficient, update=update)

    def results(self, engine: RLHFEngine, _: HeldOutPrompts, when: str) -> dict[str, Any]:
        """Return the perplexity on held-out blocks; {} if there are none."""
        if not self._held_out:
            return {}
        return {f"corpus_perplexity_{when}": corpus_perplexity(engine, self._held_out)}


HOOK = CorpusHook
