"""Keys of the adapters, and of ZeRO's communication of frozen weights."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from rlhf.config.schema.keys import (
    ABOVE_0,
    AT_LEAST_0,
    EVERY_PHASE,
    FROM_0_BELOW_1,
    ONLY_PPO,
    Unread,
    key,
    needs,
)

LoraRole = StrEnum("LoraRole", "sft reward actor critic")
"""Models that can get adapters; the policy of DPO counts as actor."""

LoraExport = StrEnum("LoraExport", "merged adapter")
"""Forms in which a model with adapters is saved."""

ADAPTERS = [needs("rank", fix="add lora=default")]

CRITIC_ADAPTERS = [
    *ADAPTERS,
    Unread(("roles",), lambda roles: LoraRole.critic not in roles, "add critic to {key}"),
    needs("ppo.advantage_estimator", "gae"),
]


@dataclass(kw_only=True)
class LoraConfig:
    """Settings of low-rank adapters (https://arxiv.org/abs/2106.09685), made with peft."""

    rank: int = key(AT_LEAST_0, unread=())
    """Rank of the adapters; 0: no adapters."""
    alpha: float = key(ABOVE_0)
    """The output of an adapter is multiplied by alpha / rank."""
    dropout: float = key(FROM_0_BELOW_1)
    """Dropout probability of the adapters' input."""
    target_modules: list[str] | None
    """Suffixes of the names of adapted layers; null: all linear layers except the output layer."""
    roles: list[LoraRole]
    """Models that get adapters: some of sft, reward, actor (also DPO's policy), critic."""
    train_rest: bool
    """Also train weights without adapters: embeddings, norms, biases (as DeepSpeed-Chat does)."""
    lr: float | None = key(ABOVE_0)
    """Peak learning rate of the adapters; null: the learning rate of the phase."""
    critic_rank: int | None = key(ABOVE_0, affects=ONLY_PPO, unread=CRITIC_ADAPTERS)
    """Rank of the critic's adapters; null: rank."""
    critic_lr: float | None = key(ABOVE_0, affects=ONLY_PPO, unread=CRITIC_ADAPTERS)
    """Peak learning rate of the critic's adapters; null: lr, or if that is null, ppo.critic_lr."""
    export: LoraExport
    """merged: save an ordinary model; adapter: save a peft folder that names its base model."""


@dataclass(kw_only=True)
class LoraGroup:
    """The group ``lora`` of a run."""

    lora: LoraConfig = key(affects=EVERY_PHASE, unread=ADAPTERS)


@dataclass(kw_only=True)
class FrozenWeightKeys:
    """Keys of the group ``zero`` for the frozen weights of models with adapters."""

    quantize_frozen_weights: bool
    """All-gather frozen weights as int8 (MixZ++); requires stage 3, LoRA and fp16 on GPUs."""
