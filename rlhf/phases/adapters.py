"""Which models of a run get LoRA adapters, and how fast these learn."""

from __future__ import annotations

from rlhf.config.choices import LoraRole
from rlhf.config.schema import LoraConfig
from rlhf.models.lora import LoraSpec


def lora_spec(lora: LoraConfig, role: LoraRole) -> LoraSpec | None:
    """The adapters of a model; None where it has none."""
    rank = lora.critic_rank if role is LoraRole.critic and lora.critic_rank else lora.rank
    if not lora.rank or role not in lora.roles:
        return None
    return LoraSpec(
        rank=rank,
        alpha=lora.alpha,
        dropout=lora.dropout,
        target_modules=None if lora.target_modules is None else tuple(lora.target_modules),
        train_rest=lora.train_rest,
    )


def adapter_lr(lora: LoraConfig, role: LoraRole) -> float | None:
    """Peak learning rate of a model's adapters; None: that of its phase."""
    return lora.critic_lr if role is LoraRole.critic and lora.critic_lr else lora.lr
