"""Rules for runs that continue responses from the middle."""

from __future__ import annotations

from rlhf.base.errors import refuse_broken_rule
from rlhf.config.batches import rollout_plan
from rlhf.config.choices import AdvantageEstimator, Phase
from rlhf.config.schema.run import RunConfig
from rlhf.options import Backend
from rlhf.options.branches.keys import ValueTargets


def check_batches(config: RunConfig) -> None:
    """Check that the run has a critic, and that its responses can be continued from any token."""
    ppo, rollout = config.ppo, config.rollout
    if Phase.ppo not in config.phase.order or not ppo.branch_setting:
        return
    rows, check = rollout_plan(config).per_rank, ppo.critic_check
    ranks = ppo.rollout_batch_size // rows
    broken = {
        f"ppo.advantage_estimator={ppo.advantage_estimator}: it has no critic; use "
        "ppo.advantage_estimator=gae": ppo.advantage_estimator is not AdvantageEstimator.gae,
        f"rollout.backend={rollout.backend}: only the fast backend continues responses; use "
        "rollout=fast": rollout.backend is not Backend.fast,
        "ppo.whiten_rewards=true: the critic learns rewards on a scale that each rollout changes; "
        "use ppo.whiten_rewards=false": ppo.whiten_rewards,
    }
    if ppo.value_targets is ValueTargets.monte_carlo:
        broken[_too_many_message("ppo.value_branches", ppo.value_branches, rows)] = (
            ppo.value_branches > rows
        )
    refuse_broken_rule(broken, f"{ppo.branch_setting} with ")
    states = {
        f"ppo.critic_check.states={check.states}: each rank takes pairs of states, at most one "
        f"from each of its responses; use a multiple of {2 * ranks} up to {2 * ranks * rows}": (
            check.states % (2 * ranks) > 0 or check.states > 2 * ranks * rows
        ),
        _too_many_message("ppo.critic_check.branches", check.branches, rows): check.branches > rows,
    }
    if check.every:
        refuse_broken_rule(states, f"ppo.critic_check.every={check.every} with ")


def _too_many_message(key: str, branches: int, rows: int) -> str:
    return (
        f"{key}={branches}: a rank samples the branches of a state together, and at most as many "
        f"as responses of a rollout; use at most {rows}"
    )
