"""Keys of the adapters, and of ZeRO's communication of frozen weights."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from rlhf.config.choices import Phase
from rlhf.config.roles import Role
from rlhf.config.schema.keys import (
    ABOVE_0,
    AT_LEAST_0,
    EVERY_PHASE,
    FROM_0_BELOW_1,
    Unread,
    always_affects,
    key,
)

ON_ONE_RANK = {"zero.quantize_frozen_weights": False}


class LoraRole(StrEnum):
    """Models that can get adapters; the policy of DPO counts as actor."""

    sft = "sft"
    reward = "reward"
    actor = "actor"
    critic = "critic"


LORA_ROLES = {  # each trained model's name in lora.roles
    Role.sft: LoraRole.sft,
    Role.reward_training: LoraRole.reward,
    Role.actor: LoraRole.actor,
    Role.critic: LoraRole.critic,
}


class LoraExport(StrEnum):
    """Forms in which a model with adapters is saved."""

    merged = "merged"
    adapter = "adapter"


NO_ADAPTERS = [
    Unread(lambda lora: lora.rank == 0, "lora.rank=0 trains without adapters", "add lora=default")
]


@dataclass(kw_only=True)
class LoraConfig:
    """Settings of low-rank adapters (https://arxiv.org/abs/2106.09685), made with peft."""

    rank: int = key(AT_LEAST_0)
    """Rank of the adapters; 0: no adapters."""
    alpha: float = key(ABOVE_0, unread=NO_ADAPTERS)
    """The output of an adapter is multiplied by alpha / rank."""
    dropout: float = key(FROM_0_BELOW_1, unread=NO_ADAPTERS)
    """Dropout probability of the adapters' input."""
    target_modules: list[str] | None = key(unread=NO_ADAPTERS)
    """Suffixes of the names of adapted layers; null: all linear layers except the output layer."""
    roles: list[LoraRole] = key(unread=NO_ADAPTERS)
    """Models that get adapters: some of sft, reward, actor (also DPO's policy), critic."""
    train_rest: bool = key(unread=NO_ADAPTERS)
    """Also train weights without adapters: embeddings, norms, biases (as DeepSpeed-Chat does)."""
    lr: float | None = key(ABOVE_0, unread=NO_ADAPTERS)
    """Peak learning rate of the adapters; null: the learning rate of the phase."""
    critic_rank: int | None = key(ABOVE_0, affects=always_affects(Phase.ppo), unread=NO_ADAPTERS)
    """Rank of the critic's adapters; null: rank."""
    critic_lr: float | None = key(ABOVE_0, affects=always_affects(Phase.ppo), unread=NO_ADAPTERS)
    """Peak learning rate of the critic's adapters; null: lr, or if that is null, ppo.critic_lr."""
    export: LoraExport = key(unread=NO_ADAPTERS)
    """merged: save an ordinary model; adapter: save a peft folder that names its base model."""


@dataclass(kw_only=True)
class LoraGroup:
    """The group ``lora`` of a run."""

    lora: LoraConfig = key(affects=EVERY_PHASE)


@dataclass(kw_only=True)
class FrozenWeightKeys:
    """Keys of the group ``zero`` for the frozen weights of models with adapters."""

    quantize_frozen_weights: bool
    """All-gather frozen weights as int8 (MixZ++); stage 3 with LoRA and fp16 on GPUs."""
