"""Schema of the config groups ``sft``, ``reward`` and ``dpo``, and of the optimizer they share."""

from __future__ import annotations

from dataclasses import dataclass

from rlhf.config.choices import DpoLossName, LossOn, LrSchedule, RewardLossName
from rlhf.config.schema.keys import (
    ABOVE_0,
    AT_LEAST_0,
    FROM_0_BELOW_1,
    FROM_0_BELOW_HALF,
    FROM_0_TO_1,
    AtResume,
    key,
)


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


@dataclass(kw_only=True)
class PairsConfig(OptimizerConfig):
    """Training on pairs of a better and a worse response."""

    epochs: float = key(ABOVE_0)
    """Passes over the pairs of the phase."""
    batch_size: int = key(ABOVE_0)
    """Pairs per optimizer step, over all ranks."""
    micro_batch_size: int | None = key(ABOVE_0, at_resume=AtResume.rounding)
    """Pairs that one rank runs at once; null: half as many as the hardware allows."""
    max_tokens: int = key(ABOVE_0)
    """Maximum length in tokens; pairs with a longer sequence are skipped and counted."""
    eval_examples: int = key(ABOVE_0)
    """Maximum number of held-out pairs to measure accuracy on."""
    eval_every: int = key(AT_LEAST_0)
    """Optimizer steps between evaluations; 0: only after training."""


@dataclass(kw_only=True)
class RewardConfig(PairsConfig):
    """Reward model training."""

    loss: RewardLossName
    """end: on the end scores (InstructGPT); from_divergence: on all differing tokens."""
    group_pairs: bool
    """Keep all pairs of one prompt in one batch, each prompt with weight 1 (InstructGPT)."""


@dataclass(kw_only=True)
class DpoConfig(PairsConfig):
    """Direct preference optimisation, instead of reward model training and PPO."""

    loss: DpoLossName
    """sigmoid: DPO's logistic loss; ipo: a squared loss, which bounds the pull of a single pair."""
    beta: float = key(ABOVE_0)
    """Strength of the pull to the reference; the implicit reward is beta * log(pi / pi_ref)."""
    label_smoothing: float = key(FROM_0_BELOW_HALF)
    """Share of pairs whose label is assumed to be wrong (conservative DPO); 0: none."""
    eval_prompts: int = key(ABOVE_0)
    """Maximum number of held-out prompts to answer before and after training."""
