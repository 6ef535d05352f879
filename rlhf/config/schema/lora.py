"""Schema of the config group ``lora``."""

from __future__ import annotations

from dataclasses import dataclass

from rlhf.config.choices import (
    LoraExport,
    LoraRole,
)
from rlhf.config.schema.bounds import ABOVE_0, AT_LEAST_0, FROM_0_BELOW_1, bounded


@dataclass(kw_only=True)
class LoraConfig:
    """Low-rank adapters (https://arxiv.org/abs/2106.09685), made with peft."""

    rank: int = bounded(AT_LEAST_0)
    """Rank of the adapters; 0: no adapters."""
    alpha: float = bounded(ABOVE_0)
    """The output of an adapter is multiplied by alpha / rank."""
    dropout: float = bounded(FROM_0_BELOW_1)
    """Dropout probability of the adapters' input."""
    target_modules: list[str] | None
    """Suffixes of the names of adapted layers; null: all linear layers except the output layer."""
    roles: list[LoraRole]
    """Models that get adapters: some of sft, reward, actor (also DPO's policy), critic."""
    train_rest: bool
    """Also train weights without adapters: embeddings, norms, biases (as DeepSpeed-Chat does)."""
    lr: float | None = bounded(ABOVE_0)
    """Peak learning rate of the adapters; null: the learning rate of the phase."""
    critic_rank: int | None = bounded(ABOVE_0)
    """Rank of the critic's adapters; null: rank."""
    critic_lr: float | None = bounded(ABOVE_0)
    """Peak learning rate of the critic's adapters; null: lr, or if that is null, ppo.critic_lr."""
    export: LoraExport
    """merged: save an ordinary model; adapter: save a peft folder that names its base model."""
