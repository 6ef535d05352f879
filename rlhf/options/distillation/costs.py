"""Costs of a teacher that replaces the reference."""

from __future__ import annotations

from dataclasses import replace

from rlhf.base.seams import Costs
from rlhf.config.choices import ModelInit, Phase
from rlhf.config.roles import Role
from rlhf.config.schema.model import ModelConfig
from rlhf.config.schema.run import RunConfig


class TeacherCosts(Costs):
    """Costs of a teacher: memory and passes of a model that may be larger than the policy."""

    def adapt_model_sources(
        self, config: RunConfig, phase: Phase, sources: dict[Role, tuple[str, ModelConfig]]
    ) -> dict[Role, tuple[str, ModelConfig]]:
        """Return the sources of models, with the teacher as PPO's reference."""
        if phase is not Phase.ppo:
            return sources
        path = config.ppo.teacher_path
        teacher = replace(config.model, init=ModelInit.pretrained, path=path)
        return sources | {Role.reference: ("ppo.teacher", teacher)}


COSTS = TeacherCosts()
