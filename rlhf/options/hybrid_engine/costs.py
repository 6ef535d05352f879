"""Costs of DeepSpeed's Hybrid Engine, which trains the actor and gathers weights for rollouts."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from rlhf.config.choices import Phase
from rlhf.config.roles import Role

if TYPE_CHECKING:
    from rlhf.models.model_uses import ModelUse

# DeepSpeed-Chat's system of 2023: the share of the peak is fitted to table 1 of its announcement,
# the others are estimates (benchmarks/planner.md).
DEEPSPEED_CHAT = {
    "training": 0.25,
    "scoring": 0.25,
    "bandwidth": 0.4,
    "attention": 0.4,
    "step_seconds": 0.0,
}


def with_hybrid_engine(phase: Phase, model: ModelUse) -> ModelUse:
    """Return PPO's actor as a model that DeepSpeed must run; other models are unchanged."""
    if phase is Phase.ppo and model.role is Role.actor:
        return replace(model, needs_deepspeed="rollout.backend=hybrid_engine")
    return model
