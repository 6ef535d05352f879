"""Rules for the config group ``lora``."""

from __future__ import annotations

from rlhf.base.errors import ConfigError
from rlhf.config.choices import (
    LoraExport,
    LoraRole,
    ModelInit,
)
from rlhf.config.schema.run import RunConfig


def check_lora(config: RunConfig) -> None:
    """Check that adapters are on trained models, and that the export saves all trained weights."""
    lora = config.lora
    if not lora.rank:
        return
    if not lora.roles:
        raise ConfigError(
            f"lora.roles=[] with lora.rank={lora.rank}: name the models that get adapters, "
            f"some of {', '.join(LoraRole)}"
        )
    if lora.train_rest and lora.export is LoraExport.adapter:
        raise ConfigError(
            "lora.export=adapter with lora.train_rest=true: the other trained weights would be "
            "lost; use lora.export=merged"
        )
    first = {"sft": ("model", config.model), "reward": ("reward_model", config.reward_model)}
    for phase, (key, model) in first.items():
        starts_random = phase in config.phase.order and model.init is ModelInit.random
        if starts_random and phase in lora.roles:
            raise ConfigError(
                f"lora.roles has {phase}, and {key}.init=random: adapters on random weights learn "
                "nothing; use lora.roles=[actor,critic], or a pretrained model"
            )
