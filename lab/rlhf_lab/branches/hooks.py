"""The hook that replaces GAE by values from branches, and checks the critic."""

from __future__ import annotations

from rlhf.base.types import Rollout, StatefulWithTensors
from rlhf.phases.ppo.hooks import PpoHook
from rlhf.phases.ppo.loop import PPOTrainer
from rlhf.phases.ppo.prompts import PromptLoader
from rlhf.phases.ppo.targets import (
    TargetMaker,
    Targets,
    TargetSteps,
    estimate_advantages,
    replace_step,
)
from rlhf_lab.branches import BranchKeys, ValueTargets
from rlhf_lab.branches.branches import STEP_VALUES, CriticCheck, add_step_values
from rlhf_lab.branches.values import step_advantages


class BranchHook(PpoHook):
    """A hook that replaces GAE if ppo.value_targets=monte_carlo, and runs ppo.critic_check."""

    _check: CriticCheck | None = None

    @property
    def _is_monte_carlo(self) -> bool:
        return BranchKeys.of(self.config).value_targets is ValueTargets.monte_carlo

    def change_target_steps(self, steps: TargetSteps) -> TargetSteps:
        """Return the steps, with VinePPO's estimator if it is switched on."""
        if not self._is_monte_carlo:
            return steps
        return replace_step(steps, estimate_advantages, _estimate_step_advantages)

    def annotate_scored_rollout(self, trainer: PPOTrainer, rollout: Rollout) -> Rollout:
        """Return the rollout, with values from branches if advantages are computed from these."""
        if not self._is_monte_carlo:
            return rollout
        maker, kl_ctl = trainer.target_maker, trainer.kl.coefficient
        return add_step_values(trainer.engine, rollout, maker, kl_ctl=kl_ctl)

    def prepare(self, trainer: PPOTrainer, loader: PromptLoader) -> dict[str, StatefulWithTensors]:
        """Prepare the checks of the critic."""
        self._check = CriticCheck(loader.context, trainer.engine)
        return {}

    def prepare_rollout(
        self, trainer: PPOTrainer, rollout: Rollout
    ) -> tuple[Rollout, dict[str, float]]:
        """Return the rollout, and the metrics of a check if one is due."""
        assert self._check is not None, "prepare comes first"
        step, kl_ctl = trainer.steps_done + 1, trainer.kl.coefficient
        maker = trainer.target_maker
        return rollout, self._check.measure_if_due(rollout, maker, step=step, kl_ctl=kl_ctl)


def _estimate_step_advantages(maker: TargetMaker, targets: Targets, rollout: Rollout) -> Targets:
    """Estimate advantages from the values of the states where steps begin (VinePPO).

    A rollout without these values, such as a rollout of held-out prompts, gets advantages from GAE.
    """
    if STEP_VALUES not in rollout.extras:
        return estimate_advantages(maker, targets, rollout)
    raw = step_advantages(
        targets.scaled_rewards_BT,
        rollout.extras[STEP_VALUES],
        rollout.responses.keep_BT,
        gamma=maker.config.gamma,
    )
    return targets._replace(raw=raw)
