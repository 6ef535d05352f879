"""The hooks of options have only methods that PPO calls, and a default run has none."""

from typing import Any

import pytest

from rlhf.config.freeze import to_run_config
from rlhf.options import modules_of
from rlhf.phases.ppo.hooks import PpoHook, build_hooks
from tests.conftest import Compose


@pytest.mark.parametrize("hook", [module.HOOK for module in modules_of("hooks")])
def test_hooks_of_options_have_no_method_that_nobody_calls(hook: Any) -> None:
    assert issubclass(hook, PpoHook)
    own = {name for name in vars(hook) if not name.startswith("_")}
    assert own <= set(vars(PpoHook))


def test_a_default_run_has_no_hooks(compose: Compose) -> None:
    assert build_hooks(to_run_config(compose([]))) == []
