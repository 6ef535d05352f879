"""LoRA settings for tests, with a default for every key."""

from typing import Any

from rlhf.models.build import Extension
from rlhf.options.lora.keys import LoraConfig, LoraExport, LoraRole
from rlhf.options.lora.models import add_adapters


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


def adding(lora: LoraConfig | None, *, seed: int = 1) -> list[Extension]:
    """Extensions of a model that add adapters; none without ``lora``."""
    if lora is None:
        return []
    return [lambda model, head: add_adapters(model, lora, seed=seed, trained=head)]
