"""LoRA settings for tests, with a default for every key."""

from __future__ import annotations

from typing import Any

from rlhf.options.lora.keys import LoraConfig, LoraExport, LoraRole


def lora_config(**changes: Any) -> LoraConfig:
    """Adapters of rank 2 without dropout on all linear layers of all models."""
    fields = {
        "rank": 2,
        "alpha": 4.0,
        "dropout": 0.0,
        "target_modules": None,
        "roles": list(LoraRole),
        "train_rest": False,
        "lr": None,
        "critic_rank": None,
        "critic_lr": None,
        "export": LoraExport.merged,
    }
    return LoraConfig(**fields | changes)
