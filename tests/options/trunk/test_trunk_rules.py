"""Rules of a shared trunk: each refusal names the key, its value and a way out."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from omegaconf import DictConfig

from rlhf.base.errors import ConfigError
from rlhf.config.freeze import to_run_config

pytestmark = pytest.mark.slow

Compose = Callable[[list[str]], DictConfig]

TRUNK = ["ppo.shared_trunk=true", "ppo.num_layers_unfrozen=2"]
RLOO = ["ppo.advantage_estimator=rloo", "ppo.responses_per_prompt=4"]


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        (
            [*RLOO, *TRUNK],
            ["ppo.shared_trunk=true", "rloo has no critic", "ppo.advantage_estimator=gae"],
        ),
        (["ppo.num_layers_unfrozen=1"], ["ppo.num_layers_unfrozen=1", "ppo.shared_trunk=true"]),
        (["ppo.num_value_layers=1"], ["ppo.num_value_layers=1", "ppo.shared_trunk=true"]),
        (
            ["ppo.shared_trunk=true"],
            ["ppo.num_layers_unfrozen=null", "ppo.shared_trunk=true", "as in trlx"],
        ),
        (
            [*TRUNK, "lora=default", "lora.roles=[actor]"],
            ["ppo.shared_trunk=true with adapters", "lora=none", "ppo.shared_trunk=false"],
        ),
        (
            [*TRUNK, "ppo.actor_freeze_steps=3"],
            ["ppo.actor_freeze_steps=3", "set ppo.actor_freeze_steps=0", "ppo.shared_trunk=false"],
        ),
    ],
)
def test_refused(overrides: list[str], parts: list[str], compose: Compose) -> None:
    with pytest.raises(ConfigError) as caught:
        to_run_config(compose(overrides))
    assert all(part in str(caught.value) for part in parts), caught.value


def test_allowed(compose: Compose) -> None:
    to_run_config(compose([*TRUNK, "ppo.num_value_layers=1"]))
