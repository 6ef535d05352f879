"""What the phases that learn from fixed examples can be told; ``schema`` holds the other groups."""

from __future__ import annotations

from dataclasses import dataclass

from rlhf.config.choices import DpoLossName, LossOn, LrSchedule, RewardLoss


@dataclass(kw_only=True)
class OptimizerConfig:
    """AdamW and its schedule."""

    lr: float
    """Peak learning rate."""
    lr_schedule: LrSchedule
    min_lr_ratio: float
    """Last learning rate over the peak."""
    warmup_steps: int
    """Optimiser steps over which the learning rate rises."""
    weight_decay: float
    """Decoupled from the gradients, as AdamW has it."""
    beta1: float
    """Decay of the gradients' running mean."""
    beta2: float
    """Decay of their squares' running mean."""
    adam_eps: float
    """Added to the root of the squares' running mean."""
    max_grad_norm: float
    """Gradients are scaled down to this norm; 0: never."""


@dataclass(kw_only=True)
class SftConfig(OptimizerConfig):
    """Supervised fine-tuning."""

    epochs: float
    """Passes over the phase's examples."""
    batch_size: int
    """Sequences per optimiser step."""
    micro_batch_size: int | None
    """Sequences that one rank runs at once; null: as many as the hardware allows."""
    max_tokens: int
    """Longer examples are left out and counted."""
    loss_on: LossOn
    eval_examples: int
    """Held-out examples that perplexity is measured on, at most."""
    eval_every: int
    """Optimiser steps between evaluations; 0: before and after training only."""


@dataclass(kw_only=True)
class RewardConfig(OptimizerConfig):
    """Reward model training."""

    epochs: float
    batch_size: int
    """Pairs per optimiser step."""
    micro_batch_size: int | None
    """Pairs that one rank runs at once; null: half of what the hardware allows."""
    max_tokens: int
    """Pairs with a longer sequence are left out and counted."""
    loss: RewardLoss
    """end: InstructGPT's, of the end scores; from_divergence: DeepSpeed-Chat's, over all tokens."""
    group_pairs: bool
    """Keep all pairs of one prompt in one batch, each prompt with weight 1 (InstructGPT)."""
    eval_examples: int
    """Held-out pairs that accuracy is measured on, at most."""
    eval_every: int
    """Optimiser steps between evaluations; 0: after training only."""


@dataclass(kw_only=True)
class DpoConfig(OptimizerConfig):
    """Direct preference optimisation, in the place of reward model and PPO."""

    epochs: float
    batch_size: int
    """Pairs per optimiser step."""
    micro_batch_size: int | None
    """Pairs that one rank runs at once; null: half of what the hardware allows."""
    max_tokens: int
    """Pairs with a longer sequence are left out and counted."""
    loss: DpoLossName
    """sigmoid: DPO; ipo: a squared distance, which bounds how far a pair can pull."""
    beta: float
    """Strength of the pull to the reference: the implicit reward is beta * log(pi / pi_ref)."""
    label_smoothing: float
    """Share of the pairs whose label is taken to be wrong (conservative DPO); 0: none."""
    eval_examples: int
    """Held-out pairs that accuracy is measured on, at most."""
    eval_every: int
    """Optimiser steps between evaluations; 0: after training only."""
    eval_prompts: int
    """Held-out prompts that are answered before and after training, at most."""
