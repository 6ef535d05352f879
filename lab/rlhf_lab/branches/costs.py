"""Costs of sampling and scoring branches, which continue responses from their middle."""

from __future__ import annotations

import math
from collections.abc import Mapping

from rlhf.config.choices import Phase
from rlhf.config.schema.run import RunConfig
from rlhf.models.model_uses import Costs
from rlhf_lab.branches import BranchKeys, ValueTargets


class BranchCosts(Costs):
    """The seconds that branches take."""

    def added_step_seconds(
        self, config: RunConfig, phase: Phase, tokens: float, seconds: Mapping[str, float]
    ) -> dict[str, float]:
        """Return the seconds per PPO step in which branches are sampled and scored."""
        if phase is not Phase.ppo:
            return {}
        branches = _num_branches_per_response(config, tokens)
        # A branch begins, on average, in the middle of a response; the whole response is scored.
        return {"branch": branches * (seconds["generate"] / 2 + seconds["score"])}


def _num_branches_per_response(config: RunConfig, tokens: float) -> float:
    """Return how many branches a step samples for each of its responses of ``tokens`` tokens."""
    keys, num_branches = BranchKeys.of(config), 0.0
    if keys.value_targets is ValueTargets.monte_carlo:
        num_branches += math.ceil(tokens / keys.value_step_tokens) * keys.value_branches
    check = keys.critic_check
    if check.every:
        num_branches += check.states * check.branches / check.every / config.ppo.rollout_batch_size
    return num_branches
