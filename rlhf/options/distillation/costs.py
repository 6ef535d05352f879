"""Costs of teachers: a reference that may be larger than the policy, or reads once more."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from rlhf.config.choices import ModelInit, Phase
from rlhf.config.roles import Role
from rlhf.config.schema.model import ModelConfig
from rlhf.config.schema.run import RunConfig
from rlhf.models.model_uses import models_in_phase


def adapt_model_sources(
    config: RunConfig, phase: Phase, sources: dict[Role, tuple[str, ModelConfig]]
) -> dict[Role, tuple[str, ModelConfig]]:
    """Return the sources of models, with the model of ``teacher_path`` as PPO's reference."""
    path = config.ppo.teacher_path
    if phase is not Phase.ppo or path is None:
        return sources
    teacher = replace(config.model, init=ModelInit.pretrained, path=path)
    return sources | {Role.reference: ("ppo.teacher", teacher)}


def added_step_seconds(
    config: RunConfig, phase: Phase, _: float, seconds: Mapping[str, float]
) -> dict[str, float]:
    """Return the seconds per PPO step of the reference's second pass: those of a mean pass."""
    if phase is not Phase.ppo or config.ppo.teacher_prompt_column is None:
        return {}
    others = {model.role for model in models_in_phase(config, phase)} - {Role.actor}
    return {"teach": seconds["score"] / max(1, len(others))}
