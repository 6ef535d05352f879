"""Costs of the actor's average: an fp32 copy of its trained weights."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from rlhf.config.choices import Phase
from rlhf.config.roles import Role
from rlhf.config.schema.run import RunConfig

if TYPE_CHECKING:
    from rlhf.models.model_uses import ModelUse


def adapt_model(config: RunConfig, phase: Phase, model: ModelUse) -> ModelUse:
    """Add the average to PPO's actor, as an fp32 copy of its weights."""
    if model.role is Role.actor and Phase.ppo in config.phase.order:
        return replace(model, fp32_copies=(*model.fp32_copies, "ema"))
    return model
