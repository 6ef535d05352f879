"""Costs of one model in PPO instead of three; its branches are counted as extra weights."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from rlhf.config.choices import Phase
from rlhf.config.roles import Role
from rlhf.config.schema.run import RunConfig

if TYPE_CHECKING:
    from rlhf.models.model_uses import ModelUse


def with_shared_trunk(config: RunConfig, phase: Phase, model: ModelUse) -> ModelUse:
    """Return PPO's actor with the weights of the shared trunk; other models are unchanged."""
    if phase is not Phase.ppo or model.role is not Role.actor:
        return model
    ppo, shape = config.ppo, model.shape
    unfrozen = min(ppo.num_layers_unfrozen or 0, shape.layers)
    top = unfrozen * shape.weights_per_layer + shape.tail + shape.head
    critic_weights = 0
    if ppo.num_value_layers:
        critic_weights = ppo.num_value_layers * shape.weights_per_layer + shape.tail
    trained = top + critic_weights + shape.embedding
    return replace(
        model,
        trained=trained,
        extra_weights=trained,  # the reference's copies, and the critic's layers and head
        layers=unfrozen + ppo.num_value_layers,
        checkpointed=max(0, model.checkpointed - (shape.layers - unfrozen)),
        scores_at_once=True,
    )
