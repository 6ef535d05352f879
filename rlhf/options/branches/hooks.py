"""The hook that replaces GAE by values from branches, and checks the critic."""

from __future__ import annotations

from rlhf.base.types import Rollout, StatefulWithTensors
from rlhf.options.branches.branches import STEP_VALUES, CriticCheck, add_step_values
from rlhf.options.branches.keys import ValueTargets
from rlhf.options.branches.values import step_advantages
from rlhf.phases.ppo.hooks import PpoHook
from rlhf.phases.ppo.loop import PPOTrainer
from rlhf.phases.ppo.prompts import PromptLoader
from rlhf.phases.ppo.targets import TargetMaker, Targets, TargetSteps


class BranchHook(PpoHook):
    """A hook that replaces GAE if ppo.value_targets=monte_carlo, and runs ppo.critic_check."""

    _check: CriticCheck | None = None

    @property
    def _is_monte_carlo(self) -> bool:
        return self.config.ppo.value_targets is ValueTargets.monte_carlo

    def change_target_steps(self, steps: TargetSteps) -> TargetSteps:
        """Return the steps; VinePPO's estimator replaces GAE if a rollout has values of steps."""
        if not self._is_monte_carlo:
            return steps
        by_gae = steps["estimate"]

        def estimate(maker: TargetMaker, targets: Targets, rollout: Rollout) -> Targets:
            has_values = STEP_VALUES in rollout.extras
            return (_estimate_step_advantages if has_values else by_gae)(maker, targets, rollout)

        return {**steps, "estimate": estimate}

    def annotate_scored_rollout(self, trainer: PPOTrainer, rollout: Rollout) -> Rollout:
        """Return the rollout, with values from branches if advantages are estimated from them."""
        if not self._is_monte_carlo:
            return rollout
        maker, kl_ctl = trainer.target_maker, trainer.kl.coefficient
        return add_step_values(trainer.engine, rollout, maker, self.config.ppo, kl_ctl=kl_ctl)

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
        found = self._check.measure_if_due(rollout, trainer.target_maker, step=step, kl_ctl=kl_ctl)
        return rollout, found


def _estimate_step_advantages(maker: TargetMaker, targets: Targets, rollout: Rollout) -> Targets:
    """Estimate advantages from the values of the states where steps begin (VinePPO)."""
    raw = step_advantages(
        targets.scaled_rewards_BT,
        rollout.extras[STEP_VALUES],
        rollout.responses.keep_BT,
        gamma=maker.config.gamma,
    )
    return targets._replace(raw=raw)


HOOK = BranchHook
