"""Rules for options of PPO that continue responses from states in their middle."""

from __future__ import annotations

from rlhf.base.errors import refuse_first
from rlhf.config.choices import AdvantageEstimator, Backend
from rlhf.config.schema.environment import EnvironmentConfig
from rlhf.config.schema.ppo import PpoConfig, ValueTargets
from rlhf.config.schema.rollout import RolloutConfig


def check_branches(
    ppo: PpoConfig, rollout: RolloutConfig, environment: EnvironmentConfig, *, rows: int
) -> None:
    """Check that the run has a critic, and that its responses can be continued from any token.

    ``rows`` is the number of responses per rank.
    """
    check, ranks = ppo.critic_check, ppo.rollout_batch_size // rows
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
    }
    if ppo.value_targets is ValueTargets.monte_carlo:
        branches = ppo.value_branches
        own = {_too_many("ppo.value_branches", branches, rows): branches > rows}
        refuse_first(broken | own, "ppo.value_targets=monte_carlo with ")
    if check.every:
        own = {
            f"ppo.critic_check.states={check.states}: each rank takes pairs of states, at most one "
            f"from each of its responses; use a multiple of {2 * ranks} up to {2 * ranks * rows}": (
                check.states % (2 * ranks) > 0 or check.states > 2 * ranks * rows
            ),
            _too_many("ppo.critic_check.branches", check.branches, rows): check.branches > rows,
        }
        refuse_first(broken | own, f"ppo.critic_check.every={check.every} with ")


def _too_many(key: str, branches: int, rows: int) -> str:
    return (
        f"{key}={branches}: a rank samples the branches of a state together, and at most as many "
        f"as responses of a rollout; use at most {rows}"
    )
