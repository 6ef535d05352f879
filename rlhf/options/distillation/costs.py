"""Costs of a teacher, which replaces the reference and may be larger than the policy."""

from __future__ import annotations

from dataclasses import replace

from rlhf.config.choices import ModelInit, Phase
from rlhf.config.roles import Role
from rlhf.config.schema.model import ModelConfig
from rlhf.config.schema.run import RunConfig


def adapt_model_sources(
    config: RunConfig, phase: Phase, sources: dict[Role, tuple[str, ModelConfig]]
) -> dict[Role, tuple[str, ModelConfig]]:
    """Return the sources of models, with the teacher as PPO's reference."""
    if phase is not Phase.ppo:
        return sources
    path = config.ppo.teacher_path
    teacher = replace(config.model, init=ModelInit.pretrained, path=path)
    return sources | {Role.reference: ("ppo.teacher", teacher)}
