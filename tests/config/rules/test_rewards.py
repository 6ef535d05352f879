"""Rules for ``rewards``: each refusal names the key, its value and a way out."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
from omegaconf import DictConfig

from rlhf.base.errors import ConfigError
from rlhf.config.choices import RewardKind
from rlhf.config.freeze import to_run_config
from rlhf.config.hydra_errors import to_hydra_override
from rlhf.config.roles import has_reward_model, reward_key_by_column, reward_model_base
from rlhf.config.schema.rewards import READ

Compose = Callable[[list[str]], DictConfig]

RULE = ["phase=pipeline_rule", "model@reward_model=gold"]
ALONE = ["phase=ppo", "model=pretrained", "model.path=x"]
FUNCTION = "kind: function, function: 'my_rewards:brief', run_code: true"
WORKING = {
    "model": "kind: model",
    "gold": "kind: gold, weight: -0.5, normalise: true",
    "environment": "kind: environment, weight: 2",
    "function": f"{FUNCTION}, columns: [answer], timeout_seconds: 3, fallback: 0",
    "http": "kind: http, url: 'http://localhost:8000/score', batch_size: 8, retries: 0",
    "length": "kind: length, least: 2, most: 40, slack: 10",
    "stop": "kind: stop, weight: 0.2",
    "pattern": "kind: pattern, pattern: '<b>.*</b>', whole: true",
    "exact": "kind: exact, columns: [answer]",
    "number": "kind: number, columns: [answer]",
    "json": "kind: json, json_schema: schema.json",
}


@pytest.mark.parametrize("kind", RewardKind)
def test_each_kind_works_with_its_keys(kind: RewardKind, compose: Compose) -> None:
    given = [] if kind is RewardKind.model else RULE
    if kind is RewardKind.environment:
        given = [*RULE, "data=environment", "environment=number_guessing"]
    config = to_run_config(
        compose([*given, to_hydra_override(f"rewards.part={{{WORKING[kind]}}}")])
    )
    assert config.rewards["part"].kind is kind
    assert set(READ) == set(RewardKind)


@pytest.mark.parametrize(
    ("part", "parts"),
    [
        ("kind: stop, weight: 0", ["rewards.part.weight=0", "does not learn from"]),
        ("kind: stop, weight: nan", ["rewards.part.weight=nan", "finite"]),
        ("kind: stop, timeout_seconds: 0", ["rewards.part.timeout_seconds=0", "above 0"]),
        ("kind: stop, most: 3", ["rewards.part.most=3", "kind=stop does not read it"]),
        ("kind: length", ["kind=length needs least or most"]),
        ("kind: length, least: 5, most: 2", ["rewards.part.most=2", "rewards.part.least=5"]),
        ("kind: pattern", ["rewards.part.pattern is missing"]),
        ("kind: pattern, pattern: '('", ["rewards.part.pattern=(", "not a regular expression"]),
        ("kind: number", ["rewards.part.columns is missing"]),
        ("kind: exact, columns: [a, b]", ["columns=[a,b]", "one column"]),
        ("kind: function", ["rewards.part.function is missing"]),
        ("kind: function, function: brief", ["function=brief", "MODULE:FUNCTION"]),
        ("kind: function, function: 'm:f'", ["function=m:f runs code", "run_code=true"]),
        ("kind: http, url: 'file:///etc/passwd'", ["url=file:///etc/passwd", "http://"]),
        ("kind: http, url: 'http://[::1/x'", ["url=http://[::1/x: not an address"]),
        ("kind: http, url: 'http://h:99999'", ["url=http://h:99999: not an address", "65535"]),
        ("kind: http, url: 'http://h:abc'", ["url=http://h:abc: not an address"]),
        ("kind: http, url: 'http://h:0'", ["url=http://h:0: the port must be from 1"]),
        ("kind: http, url: 'http://a b/x'", ["url=http://a b/x: must be ASCII without spaces"]),
        ("kind: http, url: 'http://é/x'", ["must be ASCII"]),
        ("kind: stop, timeout_seconds: 1e10", ["timeout_seconds=10000000000.0", "(a year)"]),
        ("kind: stop, weight: 1e300", ["rewards.part.weight=1e+300", "to 1e15"]),
        ("kind: stop, fallback: -1e308", ["rewards.part.fallback=-1e+308", "-1e15"]),
        ("kind: exact, columns: [x]", ["rewards.part.columns=[x]: data=synthetic", "has answer"]),
        ("kind: gold, fallback: 1", ["rewards.part.fallback=1", "does not read it"]),
    ],
)
def test_a_part_that_cannot_work_is_refused(part: str, parts: list[str], compose: Compose) -> None:
    with pytest.raises(ConfigError) as caught:
        to_run_config(compose([*RULE, to_hydra_override(f"rewards={{part: {{{part}}}}}")]))
    assert all(each in str(caught.value) for each in parts), caught.value


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["rewards={a: {kind: stop}}"], r"without kind=model .* phase=pipeline_rule"),
        ([*RULE, "rewards={a: {kind: model}}"], r"kind=model and reward_model.init=gold"),
        ([*RULE, "data=local", "data.path=x", "rewards={a: {kind: gold}}"], "kind=gold and data"),
        ([*RULE, "rewards={a-b: {kind: stop}}"], "letters, digits and _"),
        (
            ["phase=ppo", "model=pretrained", "model.path=x", "rewards={a: {kind: model}}"],
            "trained",
        ),
    ],
)
def test_parts_need_the_models_of_the_run(
    overrides: list[str], message: str, compose: Compose
) -> None:
    with pytest.raises(ConfigError) as caught:
        to_run_config(compose([to_hydra_override(each) for each in overrides]))
    assert re.search(message, str(caught.value)), caught.value


def test_without_a_reward_model_the_critic_starts_from_the_sft_model(compose: Compose) -> None:
    parts = to_hydra_override(
        "rewards={ends: {kind: stop}, right: {kind: exact, columns: [answer]}}"
    )
    config = to_run_config(compose([*RULE, "data=local", "data.path=x", parts]))
    assert not has_reward_model(config)
    assert reward_model_base(config)[0] == "model"
    assert reward_key_by_column(config) == {"answer": "rewards.right.columns"}
    mixed = compose([to_hydra_override("rewards={learned: {kind: model}, ends: {kind: stop}}")])
    assert has_reward_model(to_run_config(mixed))
