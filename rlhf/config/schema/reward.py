"""Schema of the config group ``reward``."""

from __future__ import annotations

from dataclasses import dataclass

from rlhf.config.choices import RewardLossName
from rlhf.config.schema.keys import ABOVE_0, AT_LEAST_0, AtResume, key
from rlhf.config.schema.optimizer import OptimizerConfig


@dataclass(kw_only=True)
class RewardConfig(OptimizerConfig):
    """Reward model training."""

    epochs: float = key(ABOVE_0)
    """Passes over the pairs of the phase."""
    batch_size: int = key(ABOVE_0)
    """Pairs per optimizer step, over all ranks."""
    micro_batch_size: int | None = key(ABOVE_0, at_resume=AtResume.rounding)
    """Pairs that one rank runs at once; null: half as many as the hardware allows."""
    max_tokens: int = key(ABOVE_0)
    """Maximum length in tokens; pairs with a longer sequence are skipped and counted."""
    loss: RewardLossName
    """end: on the end scores (InstructGPT); from_divergence: on all differing tokens."""
    group_pairs: bool
    """Keep all pairs of one prompt in one batch, each prompt with weight 1 (InstructGPT)."""
    eval_examples: int = key(ABOVE_0)
    """Maximum number of held-out pairs to measure accuracy on."""
    eval_every: int = key(AT_LEAST_0)
    """Optimizer steps between evaluations; 0: only after training."""
