"""Costs of the members after the first: the weights of their own top layers, norms and heads."""

from __future__ import annotations

from dataclasses import replace

from rlhf.config.choices import Phase
from rlhf.config.roles import Role
from rlhf.config.schema.run import RunConfig
from rlhf.models.model_uses import Costs, ModelUse
from rlhf_lab.ensembles import CombineName, EnsembleKeys


class EnsembleCosts(Costs):
    """The memory and the computation of the further members."""

    def adapt_model(self, config: RunConfig, phase: Phase, model: ModelUse) -> ModelUse:
        """Add the weights of the further members, unless they were averaged to one model."""
        reward, shape = EnsembleKeys.of(config), model.shape
        is_averaged = model.role is Role.reward and reward.combine is CombineName.warm
        if is_averaged or model.role not in (Role.reward_training, Role.reward):
            return model
        layers = min(reward.num_own_layers(shape.layers), shape.layers)
        per_member = layers * shape.weights_per_layer + shape.tail + shape.embedding
        added = (reward.members - 1) * per_member
        trained = 0 if model.role.is_frozen else model.trained + added
        return replace(model, trained=trained, successive_weights=added)
