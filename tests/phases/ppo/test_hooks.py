"""The hooks of options have only methods that PPO calls, and a default run has none."""

from typing import Any

import pytest

from rlhf.config.freeze import to_run_config
from rlhf.methods import installed_methods
from rlhf.options.ahead.hooks import AheadHook
from rlhf.options.average.hooks import AverageHook
from rlhf.options.corrections.hooks import CorrectionHook
from rlhf.options.environments.hooks import EpisodeHook
from rlhf.options.ptx.hooks import CorpusHook
from rlhf.options.rollout_log.hooks import RolloutLogHook
from rlhf.phases.ppo.hooks import PpoHook, build_hooks
from tests.conftest import Compose

HOOKS = [AheadHook, AverageHook, CorpusHook, CorrectionHook, EpisodeHook, RolloutLogHook]
HOOKS += [hook for method in installed_methods() if (hook := method.hook()) is not None]


@pytest.mark.parametrize("hook", HOOKS)
def test_hooks_have_no_method_that_nobody_calls(hook: Any) -> None:
    assert issubclass(hook, PpoHook)
    own = {name for name in vars(hook) if not name.startswith("_")}
    assert own <= set(vars(PpoHook))


def test_a_default_run_has_no_hooks(compose: Compose) -> None:
    assert build_hooks(to_run_config(compose([]))) == []
