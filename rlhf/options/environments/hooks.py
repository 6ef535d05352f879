"""The hook that lets PPO learn from episodes: advantages of turns, and measures.

Shapes: B = episodes of this rank, T = tokens after the prompt.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from rlhf.algorithms.advantages import Advantages, gae
from rlhf.base.types import Rollout
from rlhf.config.choices import AdvantageEstimator
from rlhf.options.environments.keys import GaeUnit
from rlhf.options.environments.responses import measure_responses
from rlhf.options.environments.turn_advantages import turn_gae
from rlhf.options.environments.turns import Turns, turns_of
from rlhf.phases.ppo.hooks import PpoHook
from rlhf.phases.ppo.loop import PPOTrainer
from rlhf.phases.ppo.targets import (
    TargetMaker,
    Targets,
    TargetSteps,
    estimate_advantages,
    estimate_with_decoupled_lambdas,
    replace_step,
)


class EpisodeHook(PpoHook):
    """A hook that adds advantages of turns, and measures of episodes."""

    def change_target_steps(self, steps: TargetSteps) -> TargetSteps:
        """Return ``steps``; if advantages are estimated by GAE, its time step is ppo.gae_unit."""
        is_gae = self.config.ppo.advantage_estimator is AdvantageEstimator.gae
        return replace_step(steps, estimate_advantages, _estimate_by_gae) if is_gae else steps

    def annotate_scored_rollout(self, trainer: PPOTrainer, rollout: Rollout) -> Rollout:  # noqa: ARG002
        """Return the rollout with the measures of its episodes."""
        measures = {**rollout.measures, **measure_responses(rollout.responses)}
        return rollout._replace(measures=measures)


def _estimate_by_gae(maker: TargetMaker, targets: Targets, rollout: Rollout) -> Targets:
    """Estimate advantages by GAE, which bootstraps cut episodes from the critic's last value.

    With ppo.gae_unit=turn a time step is a turn.
    """
    config, turns, keep_BT = maker.config, _require_turns(rollout), rollout.responses.keep_BT
    assert rollout.last_values_B is not None, "the rollout was scored without a critic"
    last_values_B = rollout.last_values_B.masked_fill(~turns.truncated_B, 0.0)
    rewards_BT, values_BT = targets.scaled_rewards_BT, rollout.values_BT
    estimate: Callable[..., Advantages] = partial(gae, rewards_BT, values_BT, keep_BT)
    if config.gae_unit is GaeUnit.turn:
        costs_BT = targets.penalty_BT
        estimate = partial(turn_gae, rewards_BT + costs_BT, costs_BT, values_BT, turns.turn_BT)
    estimate = partial(estimate, gamma=config.gamma, last_values_B=last_values_B)
    return targets._replace(raw=estimate_with_decoupled_lambdas(estimate, keep_BT, config))


def _require_turns(rollout: Rollout) -> Turns:
    turns = turns_of(rollout.responses)
    assert turns is not None, "an environment without episodes"
    return turns
