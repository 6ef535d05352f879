"""Costs of a moving reference: its weights in each checkpoint."""

from __future__ import annotations

from dataclasses import replace

from rlhf.config.choices import Phase
from rlhf.config.roles import Role
from rlhf.config.schema.run import RunConfig
from rlhf.models.model_uses import Costs, ModelUse


class MovingReferenceCosts(Costs):
    """The bytes that the reference adds to checkpoints."""

    def adapt_model(self, config: RunConfig, phase: Phase, model: ModelUse) -> ModelUse:
        """Mark PPO's reference as a part of checkpoints."""
        is_moving = model.role is Role.reference and phase is Phase.ppo
        return replace(model, is_stored=True) if is_moving else model
