"""Schema of AdamW and its schedule, shared by the config groups sft, reward and dpo."""

from __future__ import annotations

from dataclasses import dataclass

from rlhf.config.choices import LrSchedule
from rlhf.config.schema.keys import ABOVE_0, AT_LEAST_0, FROM_0_BELOW_1, FROM_0_TO_1, key


@dataclass(kw_only=True)
class OptimizerConfig:
    """AdamW and its learning-rate schedule."""

    lr: float = key(ABOVE_0)
    """Peak learning rate."""
    lr_schedule: LrSchedule
    """Learning rate after the warm-up: constant, linear, cosine or inverse_sqrt."""
    min_lr_ratio: float = key(FROM_0_TO_1)
    """Final learning rate (inverse_sqrt: lowest) as a share of the peak; unused by constant."""
    warmup_steps: int = key(AT_LEAST_0)
    """Optimizer steps over which the learning rate rises to its peak; 0: no warm-up."""
    weight_decay: float = key(AT_LEAST_0)
    """AdamW's decoupled weight decay, of matrices only; 0: none."""
    beta1: float = key(FROM_0_BELOW_1)
    """AdamW's decay rate of the running mean of gradients."""
    beta2: float = key(FROM_0_BELOW_1)
    """AdamW's decay rate of the running mean of squared gradients."""
    adam_eps: float = key(ABOVE_0)
    """AdamW's epsilon, added to the root of the running mean of squared gradients."""
    max_grad_norm: float = key(AT_LEAST_0)
    """Gradients with a larger norm are scaled down to this norm; 0: never."""
