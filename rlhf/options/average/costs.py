"""Costs of the actor's average: an fp32 copy of its trained weights."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from rlhf.config.choices import Phase
from rlhf.config.roles import Role
from rlhf.config.schema.run import RunConfig

if TYPE_CHECKING:
    from rlhf.models.model_uses import ModelUse


def with_average(config: RunConfig, model: ModelUse) -> ModelUse:
    """Return PPO's actor with the average, an fp32 copy of its weights; other models unchanged."""
    if model.role is Role.actor and Phase.ppo in config.phase.order:
        return replace(model, fp32_copies=(*model.fp32_copies, "ema"))
    return model
