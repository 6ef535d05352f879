"""Keys of PPO for true values of states: as targets of the critic, and for checks of it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from rlhf.config.schema.keys import ABOVE_0, ABOVE_1, AT_LEAST_0, NO_PHASE, key, needs


class ValueTargets(StrEnum):
    """Sources of advantages and of the critic's targets."""

    gae = "gae"
    monte_carlo = "monte_carlo"


LOG = "critic.jsonl"  # file in the run directory with the states of all checks

BRANCHES = needs("value_targets", "monte_carlo")
LAMBDA = needs("value_targets", "gae")
UNREAD = dict.fromkeys(("ppo.lam", "ppo.lam_critic", "ppo.lam_length_alpha"), LAMBDA)
CHECKED = needs("every", fix="add {key}=8")


@dataclass(kw_only=True)
class CriticCheckConfig:
    """Settings of the checks of the critic against true values (docs/algorithms.md)."""

    every: int = key(AT_LEAST_0)
    """PPO steps between checks, which sample responses from states in the middle of responses;
    0: none. 8 costs 7 % of the default run's steps."""
    states: int = key(ABOVE_0, unread=[CHECKED])
    """States per check, over all ranks: pairs that follow alternative steps from one state."""
    branches: int = key(ABOVE_1, unread=[CHECKED])
    """Continuations sampled from each state; their mean estimates its true value."""
    step_tokens: int = key(ABOVE_0, unread=[CHECKED])
    """Tokens of a step, by which the two states of a pair differ."""


@dataclass(kw_only=True)
class BranchKeys:
    """Keys of the group ``ppo`` for true values: as targets of the critic, and for checks of it."""

    value_targets: ValueTargets
    """gae; or monte_carlo (VinePPO): mean returns of continuations from each step's beginning."""
    value_branches: int = key(ABOVE_1, unread=[BRANCHES])
    """Continuations per step of a response with value_targets=monte_carlo."""
    value_step_tokens: int = key(ABOVE_0, unread=[BRANCHES])
    """Tokens of a step of a response with value_targets=monte_carlo."""
    critic_check: CriticCheckConfig = key(affects=NO_PHASE)
    """Checks of the critic against true values, which are sampled (docs/algorithms.md)."""

    @property
    def branch_setting(self) -> str:
        """Return the setting KEY=VALUE that makes the run sample branches; "" if there is none."""
        if self.value_targets is ValueTargets.monte_carlo:
            return "ppo.value_targets=monte_carlo"
        every = self.critic_check.every
        return f"ppo.critic_check.every={every}" if every else ""
