"""Division of each step's blocks of the corpus over the ranks, which must leave no remainder."""

from __future__ import annotations

from rlhf.config.batches import BatchPlan, build_batch_plan, num_ranks
from rlhf.config.choices import Phase
from rlhf.config.schema.run import RunConfig


def uses_corpus(config: RunConfig) -> bool:
    """Return True if ppo.ptx_coef or data.ptx_path is set, so that PPO may need a corpus."""
    return config.ppo.ptx_coef > 0 or config.data.ptx_path is not None


def check_corpus_batches(config: RunConfig) -> None:
    """Check that the corpus blocks of an optimizer step can be divided over the ranks."""
    if Phase.ppo in config.phase.order:
        ptx_batch_plan(config)


def ptx_batch_plan(config: RunConfig) -> BatchPlan:
    """Return how an optimizer step's corpus blocks are divided over ranks and micro-batches."""
    ppo = config.ppo
    return build_batch_plan(
        ppo.ptx_batch_size or ppo.mini_batch_size,
        key="ppo.ptx_batch_size" if ppo.ptx_batch_size else "ppo.mini_batch_size",
        ranks=num_ranks(config),
        micro_batch_size=None,
        cap=ppo.micro_batch_size or config.hardware.max_micro_batch_size,
    )
