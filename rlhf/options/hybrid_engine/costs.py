"""Costs of DeepSpeed's Hybrid Engine, which trains the actor and gathers weights for rollouts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from rlhf.base.packaged_yaml import read_yaml_beside
from rlhf.config.choices import Phase
from rlhf.config.roles import Role

if TYPE_CHECKING:
    from rlhf.models.model_uses import ModelUse

DEEPSPEED_CHAT: Mapping[str, float] = read_yaml_beside(__file__, "efficiency.yaml")


def with_hybrid_engine(phase: Phase, model: ModelUse) -> ModelUse:
    """Return PPO's actor as a model that DeepSpeed must run; other models are unchanged."""
    if phase is Phase.ppo and model.role is Role.actor:
        return replace(model, needs_deepspeed="rollout.backend=hybrid_engine")
    return model
