"""Costs of a teacher that reads another prompt than the policy: a second pass of the reference."""

from __future__ import annotations

from collections.abc import Mapping

from rlhf.config.choices import Phase
from rlhf.config.roles import Role
from rlhf.config.schema.run import RunConfig
from rlhf.models.model_uses import Costs, models_in_phase
from rlhf_lab.distillation import DistillationKeys


class TeacherCosts(Costs):
    """The seconds of the second pass of the reference."""

    def added_step_seconds(
        self, config: RunConfig, phase: Phase, tokens: float, seconds: Mapping[str, float]
    ) -> dict[str, float]:
        """Return the seconds per PPO step of this pass: as long as the mean scoring pass."""
        if phase is not Phase.ppo or DistillationKeys.of(config).teacher_prompt_column is None:
            return {}
        scorers = {model.role for model in models_in_phase(config, phase)} - {Role.actor}
        return {"teach": seconds["score"] / max(1, len(scorers))}
