"""Costs of the moving average of the actor's weights."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from rlhf.base.seams import Costs
from rlhf.config.choices import Phase
from rlhf.config.roles import Role
from rlhf.config.schema.run import RunConfig

if TYPE_CHECKING:
    from rlhf.models.model_uses import ModelUse


class AverageCosts(Costs):
    """Costs of the average: an fp32 copy of the actor's trained weights, and its evaluation."""

    def adapt_model(self, config: RunConfig, phase: Phase, model: ModelUse) -> ModelUse:
        """Add the average to PPO's actor, as an fp32 copy of its weights."""
        if model.role is Role.actor and Phase.ppo in config.phase.order:
            return replace(model, fp32_copies=(*model.fp32_copies, "ema"))
        return model

    def num_added_evaluations(self, config: RunConfig) -> int:
        """Return 1: the average answers the held-out prompts at the end."""
        return 1

    def offload_keys(self) -> dict[str, str]:
        """Return the key of ``zero`` that offloads the average -> the average's name in a plan."""
        return {"offload_ema": "moving average"}


COSTS = AverageCosts()
