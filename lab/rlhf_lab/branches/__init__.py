"""Values of states from Monte Carlo continuations, and a check of the critic against them.

Each rank samples continuations (branches) of responses from states in their middle. The mean return
of a state's branches estimates the state's true value. VinePPO, https://arxiv.org/abs/2410.01679,
computes advantages from such values; ``ppo.critic_check`` compares the critic's values with them.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from rlhf.base.errors import refuse_broken_rule
from rlhf.config.batches import rollout_plan
from rlhf.config.choices import AdvantageEstimator, Phase
from rlhf.config.schema.keys import ABOVE_0, ABOVE_1, AT_LEAST_0, NO_PHASE, key, needs
from rlhf.methods import Method, MethodKeys

if TYPE_CHECKING:
    from rlhf.config.schema.run import RunConfig
    from rlhf_lab.branches.costs import BranchCosts
    from rlhf_lab.branches.hooks import BranchHook
    from rlhf_lab.branches.true_value_charts import TrueValueCharts


class ValueTargets(StrEnum):
    """Sources of advantages and of the critic's targets."""

    gae = "gae"
    monte_carlo = "monte_carlo"


ONLY_MONTE_CARLO = needs("value_targets", "monte_carlo")
ONLY_GAE = needs("value_targets", "gae")
CHECKED = needs("every", fix="add {key}=8")


@dataclass(kw_only=True)
class CriticCheckConfig:
    """Settings of the checks of the critic against true values."""

    every: int = key(AT_LEAST_0, default=0)
    """PPO steps between checks, which sample responses from states in the middle of responses;
    0: none. 8 costs 7 % of the default run's steps."""
    states: int = key(ABOVE_0, default=32, unread=[CHECKED])
    """States per check, over all ranks: pairs that follow alternative steps from one state."""
    branches: int = key(ABOVE_1, default=8, unread=[CHECKED])
    """Continuations sampled from each state; their mean estimates its true value."""
    step_tokens: int = key(ABOVE_0, default=4, unread=[CHECKED])
    """Tokens of a step, by which the two states of a pair differ."""


@dataclass(kw_only=True)
class BranchKeys(MethodKeys):
    """Keys of the group ``ppo``: values from continuations, as targets or checks of the critic."""

    value_targets: ValueTargets = ValueTargets.gae
    """gae; or monte_carlo (VinePPO): mean returns of continuations from each step's beginning."""
    value_branches: int = key(ABOVE_1, default=9, unread=[ONLY_MONTE_CARLO])
    """Continuations per step of a response with value_targets=monte_carlo."""
    value_step_tokens: int = key(ABOVE_0, default=4, unread=[ONLY_MONTE_CARLO])
    """Tokens of a step of a response with value_targets=monte_carlo."""
    critic_check: CriticCheckConfig = key(affects=NO_PHASE, default=CriticCheckConfig)
    """Checks of the critic against true values, which are sampled."""

    @property
    def setting(self) -> str:
        """Return the setting KEY=VALUE that makes the run sample branches; "" if there is none."""
        if self.value_targets is ValueTargets.monte_carlo:
            return "ppo.value_targets=monte_carlo"
        every = self.critic_check.every
        return f"ppo.critic_check.every={every}" if every else ""


class Branches(Method):
    """Estimate values of states by continuations, as targets of the critic and to check it."""

    name = "branches"
    keys = {"ppo": BranchKeys}
    off = {"ppo.value_targets": ValueTargets.gae, "ppo.critic_check.every": 0}
    unread = dict.fromkeys(("ppo.lam", "ppo.lam_critic", "ppo.lam_length_alpha"), ONLY_GAE)
    log = "critic.jsonl"  # the states of all checks

    def check(self, config: RunConfig) -> None:
        """Check that the run has a critic, and that responses can be continued from any token."""
        ppo, rollout, keys = config.ppo, config.rollout, BranchKeys.of(config)
        if Phase.ppo not in config.phase.order or not keys.setting:
            return
        rows, check = rollout_plan(config).per_rank, keys.critic_check
        ranks = ppo.rollout_batch_size // rows
        is_target = keys.value_targets is ValueTargets.monte_carlo
        broken = {
            f"environment.kind={config.environment.kind}: an environment cannot be set back to the "
            "middle of an episode; use environment=none": config.environment.is_used,
            f"rollout.lag={rollout.lag}: the responses belong to the policy of an earlier step; "
            "use rollout.lag=0": rollout.lag > 0,
            f"ppo.advantage_estimator={ppo.advantage_estimator}: it has no critic; use "
            "ppo.advantage_estimator=gae": ppo.advantage_estimator is not AdvantageEstimator.gae,
            f"rollout.backend={rollout.backend}: only the fast backend continues responses; use "
            "rollout=fast": rollout.backend != "fast",
            "ppo.whiten_rewards=true: the critic learns rewards on a scale that each rollout "
            "changes; use ppo.whiten_rewards=false": ppo.whiten_rewards,
            _too_many_message("ppo.value_branches", keys.value_branches, rows): (
                is_target and keys.value_branches > rows
            ),
        }
        refuse_broken_rule(broken, f"{keys.setting} with ")
        states = {
            f"ppo.critic_check.states={check.states}: each rank takes pairs of states, at most one "
            f"from each of its responses; use a multiple of {2 * ranks} up to {2 * ranks * rows}": (
                check.states % (2 * ranks) > 0 or check.states > 2 * ranks * rows
            ),
            _too_many_message("ppo.critic_check.branches", check.branches, rows): (
                check.branches > rows
            ),
        }
        if check.every:
            refuse_broken_rule(states, f"ppo.critic_check.every={check.every} with ")

    def hook(self) -> type[BranchHook]:
        """Return the class of the hook that replaces GAE, and checks the critic."""
        from rlhf_lab.branches.hooks import BranchHook

        return BranchHook

    def costs(self) -> BranchCosts:
        """Return the costs of branches: the seconds in which they are sampled and scored."""
        from rlhf_lab.branches.costs import BranchCosts

        return BranchCosts()

    def report(self) -> TrueValueCharts:
        """Return charts of the critic's values beside true values."""
        from rlhf_lab.branches.true_value_charts import TrueValueCharts

        return TrueValueCharts()


def _too_many_message(key_name: str, branches: int, rows: int) -> str:
    return (
        f"{key_name}={branches}: a rank samples a state's branches in one batch, which has at most "
        f"as many rows as its share of a rollout; use at most {rows}"
    )
