"""Rules for the config group ``ppo.critic_check``."""

from __future__ import annotations

from rlhf.base.errors import ConfigError
from rlhf.config.choices import AdvantageEstimator, Backend
from rlhf.config.schema.environment import EnvironmentConfig
from rlhf.config.schema.ppo import PpoConfig
from rlhf.config.schema.rollout import RolloutConfig


def check_critic_check(
    ppo: PpoConfig, rollout: RolloutConfig, environment: EnvironmentConfig, *, rows: int
) -> None:
    """Check that the run has a critic, and that its responses can be continued from any token.

    ``rows`` is the number of responses per rank.
    """
    check = ppo.critic_check
    if check.every == 0:
        return
    ranks = ppo.rollout_batch_size // rows
    broken = {
        f"ppo.advantage_estimator={ppo.advantage_estimator}: it has no critic; use "
        "ppo.advantage_estimator=gae": ppo.advantage_estimator is not AdvantageEstimator.gae,
        f"environment.kind={environment.kind}: an environment cannot be set back to the "
        "middle of an episode; use environment=none": environment.is_used,
        f"rollout.backend={rollout.backend}: only the fast backend continues responses; use "
        "rollout=fast": rollout.backend is not Backend.fast,
        f"rollout.lag={rollout.lag}: the responses belong to the policy of an earlier step; use "
        "rollout.lag=0": rollout.lag > 0,
        "ppo.whiten_rewards=true: the critic learns rewards on a scale that each rollout changes; "
        "use ppo.whiten_rewards=false": ppo.whiten_rewards,
        f"ppo.critic_check.states={check.states}: each rank takes pairs of states, at most one "
        f"from each of its responses; use a multiple of {2 * ranks} up to {2 * ranks * rows}": (
            check.states % (2 * ranks) > 0 or check.states > 2 * ranks * rows
        ),
        f"ppo.critic_check.branches={check.branches}: a rank samples the branches of a state "
        f"together, and at most as many as responses of a rollout; use at most {rows}": (
            check.branches > rows
        ),
    }
    if reason := next((each for each, is_broken in broken.items() if is_broken), None):
        raise ConfigError(f"ppo.critic_check.every={check.every} with {reason}")
