"""Schema of the config group ``sft``."""

from __future__ import annotations

from dataclasses import dataclass

from rlhf.config.choices import LossOn
from rlhf.config.schema.keys import ABOVE_0, AT_LEAST_0, AtResume, key
from rlhf.config.schema.optimizer import OptimizerConfig


@dataclass(kw_only=True)
class SftConfig(OptimizerConfig):
    """Supervised fine-tuning."""

    epochs: float = key(ABOVE_0)
    """Passes over the examples of the phase."""
    batch_size: int = key(ABOVE_0)
    """Sequences per optimizer step, over all ranks."""
    micro_batch_size: int | None = key(ABOVE_0, at_resume=AtResume.rounding)
    """Sequences that one rank runs at once; null: as many as the hardware allows."""
    max_tokens: int = key(ABOVE_0)
    """Maximum length in tokens; longer examples are skipped and counted."""
    loss_on: LossOn
    """Tokens that the loss covers: response (only the responses) or all."""
    eval_examples: int = key(ABOVE_0)
    """Maximum number of held-out examples to measure perplexity on."""
    eval_every: int = key(AT_LEAST_0)
    """Optimizer steps between evaluations; 0: only before and after training."""
