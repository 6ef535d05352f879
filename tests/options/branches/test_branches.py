"""Runs whose responses cannot be continued are refused by name, with a way out."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from omegaconf import DictConfig

from rlhf.base.errors import ConfigError
from rlhf.config.effects import refuse_unread_keys
from rlhf.config.freeze import to_run_config

Compose = Callable[[list[str]], DictConfig]

RLOO = ["ppo.advantage_estimator=rloo", "ppo.responses_per_prompt=4"]
EPISODES = ["phase=pipeline_rule", "model@reward_model=gold", "data=environment"]
EPISODES += ["environment=number_guessing", "+rewards.environment.kind=environment"]
TWO = ["hardware.ranks_per_node=2", "zero=stage1"]


@pytest.mark.parametrize(
    ("overrides", "reason", "way_out"),
    [
        (RLOO, "ppo.advantage_estimator=rloo", "use ppo.advantage_estimator=gae"),
        (EPISODES, "environment.kind=number_guessing", "use environment=none"),
        (["rollout=hf"], "rollout.backend=hf", "use rollout=fast"),
        (["rollout.lag=1"], "rollout.lag=1", "use rollout.lag=0"),
        (["ppo.whiten_rewards=true"], "ppo.whiten_rewards=true", "use ppo.whiten_rewards=false"),
        ([*TWO, "ppo.critic_check.states=6"], "states=6", "use a multiple of 4 up to 256"),
        (["ppo.critic_check.states=258"], "states=258", "use a multiple of 2 up to 256"),
        ([*TWO, "ppo.critic_check.branches=65"], "branches=65", "use at most 64"),
    ],
)
def test_it_is_refused(compose: Compose, overrides: list[str], reason: str, way_out: str) -> None:
    every = ["ppo.critic_check.every=8"]
    to_run_config(compose(overrides))
    with pytest.raises(ConfigError) as caught:
        to_run_config(compose([*overrides, *every]))
    assert str(caught.value).startswith("ppo.critic_check.every=8 with ")
    assert reason in str(caught.value)
    assert str(caught.value).endswith(way_out)


@pytest.mark.parametrize(
    ("overrides", "reason", "way_out"),
    [
        (["rollout.lag=1"], "rollout.lag=1", "use rollout.lag=0"),
        (["ppo.value_branches=129"], "ppo.value_branches=129", "use at most 128"),
    ],
)
def test_monte_carlo_targets_are_refused(
    compose: Compose, overrides: list[str], reason: str, way_out: str
) -> None:
    to_run_config(compose(overrides))
    with pytest.raises(ConfigError) as caught:
        to_run_config(compose([*overrides, "ppo.value_targets=monte_carlo"]))
    assert str(caught.value).startswith(f"ppo.value_targets=monte_carlo with {reason}: ")
    assert str(caught.value).endswith(way_out)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["ppo.critic_check.branches=4"],
            "ppo.critic_check.every=0 checks nothing and does not read ppo.critic_check.branches",
        ),
        (
            ["ppo.value_branches=4"],
            "ppo.value_targets=gae samples no branches and does not read ppo.value_branches",
        ),
        (
            ["ppo.lam=0.9", "ppo.value_targets=monte_carlo"],
            "ppo.value_targets=monte_carlo has no lambda and does not read ppo.lam",
        ),
    ],
)
def test_keys_that_nothing_reads_are_refused(
    compose: Compose, words: list[str], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        refuse_unread_keys(to_run_config(compose(words)), words)
