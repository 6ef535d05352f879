"""Schema of the config group ``dpo``."""

from __future__ import annotations

from dataclasses import dataclass

from rlhf.config.choices import DpoLossName
from rlhf.config.schema.keys import ABOVE_0, AT_LEAST_0, FROM_0_BELOW_HALF, AtResume, key
from rlhf.config.schema.optimizer import OptimizerConfig


@dataclass(kw_only=True)
class DpoConfig(OptimizerConfig):
    """Direct preference optimisation, instead of reward model training and PPO."""

    epochs: float = key(ABOVE_0)
    """Passes over the pairs of the phase."""
    batch_size: int = key(ABOVE_0)
    """Pairs per optimizer step, over all ranks."""
    micro_batch_size: int | None = key(ABOVE_0, at_resume=AtResume.rounding)
    """Pairs that one rank runs at once; null: half as many as the hardware allows."""
    max_tokens: int = key(ABOVE_0)
    """Maximum length in tokens; pairs with a longer sequence are skipped and counted."""
    loss: DpoLossName
    """sigmoid: DPO's logistic loss; ipo: a squared loss, which bounds the pull of a single pair."""
    beta: float = key(ABOVE_0)
    """Strength of the pull to the reference; the implicit reward is beta * log(pi / pi_ref)."""
    label_smoothing: float = key(FROM_0_BELOW_HALF)
    """Share of pairs whose label is assumed to be wrong (conservative DPO); 0: none."""
    eval_examples: int = key(ABOVE_0)
    """Maximum number of held-out pairs to measure accuracy on."""
    eval_every: int = key(AT_LEAST_0)
    """Optimizer steps between evaluations; 0: only after training."""
    eval_prompts: int = key(ABOVE_0)
    """Maximum number of held-out prompts to answer before and after training."""
