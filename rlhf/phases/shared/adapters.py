"""LoRA adapters of each model of a run, and their learning rates."""

from __future__ import annotations

from rlhf.config.choices import LoraRole
from rlhf.config.schema.lora import LoraConfig
from rlhf.models.lora import LoraSpec


def lora_spec(lora: LoraConfig, role: LoraRole) -> LoraSpec | None:
    """Return the adapters of the model ``role``; None if it has no adapters."""
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
    """Return the peak learning rate of a model's adapters; None: the learning rate of its phase."""
    return lora.critic_lr if role is LoraRole.critic and lora.critic_lr else lora.lr
