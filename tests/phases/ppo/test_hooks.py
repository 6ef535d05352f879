"""Where options take part in PPO, and what their hooks change."""

from typing import Any

import pytest
import torch

from rlhf.algorithms.ppo import PolicyLoss
from rlhf.base.metrics import Mean, Metrics
from rlhf.base.types import Rollout
from rlhf.config.freeze import to_run_config
from rlhf.methods import installed_methods
from rlhf.options import PpoConfig
from rlhf.options.ahead.hooks import AheadHook
from rlhf.options.average.hooks import AverageHook
from rlhf.options.corrections.hooks import CorrectionHook
from rlhf.options.environments.hooks import EpisodeHook
from rlhf.options.ptx.hooks import CorpusHook
from rlhf.options.rollout_log.hooks import RolloutLogHook
from rlhf.phases.ppo.hooks import PpoHook, build_hooks
from rlhf.phases.ppo.loop import PPOTrainer
from rlhf.phases.ppo.objective import Surrogate, SurrogateInputs, Total
from rlhf.phases.ppo.targets import TargetMaker, Targets, TargetSteps
from tests.conftest import Compose
from tests.phases.ppo.ppo_pieces import engine_config, separate_engine, some_rollout


class Doubling(PpoHook):
    """Doubles advantages after they are whitened, and halves the loss of an update."""

    def change_target_steps(self, steps: TargetSteps) -> TargetSteps:
        def double(_: TargetMaker, targets: Targets, __: Rollout) -> Targets:
            used, counted = targets.advantages, torch.ones(())
            doubled = used._replace(advantages_BT=2 * used.advantages_BT)
            metrics = {"ppo/doubled": Mean(counted, counted)}
            return targets._replace(advantages=doubled, metrics=metrics)

        return (*steps, double)

    def change_surrogate(self, surrogate: Surrogate) -> Surrogate:
        def halved(
            inputs: SurrogateInputs, config: PpoConfig, total: Total, /
        ) -> tuple[PolicyLoss, Metrics]:
            loss, metrics = surrogate(inputs, config, total)
            return loss._replace(loss=loss.loss / 2), metrics

        return halved

    def annotate_scored_rollout(self, trainer: PPOTrainer, rollout: Rollout) -> Rollout:
        assert isinstance(trainer, PPOTrainer)
        return rollout._replace(measures={"seen": torch.ones(len(rollout.scores_B))})


def test_a_hook_changes_targets_loss_and_measures(compose: Compose) -> None:
    config = to_run_config(compose(["ppo.ppo_epochs=1"])).ppo
    gradients, metrics = [], []
    for hooks in ([], [Doubling(engine_config())]):
        engine = separate_engine()
        trainer = PPOTrainer(engine, config, hooks)
        rollout = some_rollout()
        for hook in hooks:
            rollout = hook.annotate_scored_rollout(trainer, rollout)
        metrics.append(trainer.train_rlhf(rollout).metrics)
        gradients.append(engine.actor.gradients[0])
    assert all(torch.equal(gradients[0][name], found) for name, found in gradients[1].items())
    assert any(each.abs().max() > 0 for each in gradients[0].values())
    added = {"ppo/doubled": 1.0, "ppo/seen": 1.0}
    assert {name: metrics[1][name] for name in metrics[1].keys() - metrics[0].keys()} == added


HOOKS = [AheadHook, AverageHook, CorpusHook, CorrectionHook, EpisodeHook, RolloutLogHook]
HOOKS += [hook for method in installed_methods() if (hook := method.hook()) is not None]


@pytest.mark.parametrize("hook", HOOKS)
def test_hooks_have_no_method_that_nobody_calls(hook: Any) -> None:
    assert issubclass(hook, PpoHook)
    own = {name for name in vars(hook) if not name.startswith("_")}
    assert own <= set(vars(PpoHook))


def test_a_default_run_has_no_hooks(compose: Compose) -> None:
    assert build_hooks(to_run_config(compose([]))) == []
