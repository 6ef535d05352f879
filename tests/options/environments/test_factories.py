"""Which environment a configuration makes, and what is refused."""

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rlhf.base.errors import ConfigError
from rlhf.options.environments.embedded import Calculator
from rlhf.options.environments.keys import EnvironmentConfig, EnvironmentKind, FailureRewards
from rlhf.options.environments.process_pool import LocalPool, build_environment_factory, build_pool

MODULE = """
import random

class Steps:
    optimum = 2.0
    def __init__(self, size=1):
        self.size = size
    def reset(self, *, seed, row):
        return f"size {self.size} {random.random()}"
    def step(self, text):
        return (f"{random.random()}", 1.0, False, False, {"success": True})

class Tools:
    def reset(self, **row):
        return "look"
    def look(self) -> str:
        "Look."
        return str(random.random())

class Neither:
    def reset(self, *, seed, row): ...

function = len
"""


def config_of(kind: str, **keys: Any) -> EnvironmentConfig:
    """The values of conf/base, as far as environments read them."""
    rewards = FailureRewards(
        timeout=0, exception=0, died=0, invalid=0, malformed=0, cut_turn=0, too_long=0
    )
    given: dict[str, Any] = {
        "id": None,
        "target": None,
        "run_code": False,
        "options": {},
        "max_turns": 10,
        "max_tokens": 1000,
        "step_seconds": 10.0,
        "processes": 1,
        "max_failures": 0,
        "failure_rewards": rewards,
    }
    return EnvironmentConfig(**given | {"kind": EnvironmentKind(kind)} | keys)


@pytest.fixture(autouse=True)
def _module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The user's module in the working directory, and the search path as it was."""
    (tmp_path / "own_games.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield
    sys.modules.pop("own_games", None)


def of_user(name: str, kind: str = "custom", **keys: Any) -> EnvironmentConfig:
    return config_of(kind, target=f"own_games:{name}", **{"run_code": True, **keys})


def test_options_reach_the_environment() -> None:
    environment = build_environment_factory(config_of("calculator", options={"terms": 3}))()
    assert isinstance(environment, Calculator)
    assert environment.reset(seed=1, row={}).count("=") == 1
    custom = build_environment_factory(of_user("Steps", options={"size": 4}))()
    assert custom.reset(seed=1, row={}).startswith("size 4")
    assert custom.optimum == 2.0


def test_a_class_of_tools_is_recognised() -> None:
    for kind in ("custom", "tools"):
        environment = build_environment_factory(of_user("Tools", kind))()
        assert environment.reset(seed=1, row={"prompt": ""}).endswith("\n\nlook")


def test_episodes_do_not_share_global_random_numbers() -> None:
    def turns(*others: int) -> list[Any]:
        one = build_environment_factory(of_user("Steps"))()
        found: list[Any] = [one.reset(seed=5, row={})]
        for seed in others:
            build_environment_factory(of_user("Steps"))().reset(seed=seed, row={})
            found.append(one.step("x"))
        return found

    assert turns(1, 2) == turns(3, 4)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (config_of("none"), r"environment\.kind=none: there is no environment"),
        (config_of("gymnasium"), r"environment\.id is missing: kind=gymnasium needs it"),
        (config_of("custom"), r"\.target is missing: kind=custom needs it; .*=MODULE:CLASS"),
        (config_of("custom", target="own_games"), r"=own_games: .* MODULE:CLASS"),
        (of_user("Steps", run_code=False), r"runs code; .*environment\.run_code=true"),
        (
            config_of("gymnasium", id="a:B-v0"),
            r"environment\.id=a:B-v0: runs code; .*run_code=true",
        ),
        (of_user("Nothing"), r"environment\.target=own_games:Nothing: cannot be imported: Attrib"),
        (of_user("function"), r"environment\.target=own_games:function: must be a class"),
        (of_user("Neither"), r"must have the methods reset\(self, \*, seed, row\) and step"),
        (of_user("Neither", "tools"), r"must have the methods reset\(self, \*\*row\)"),
        (of_user("Steps", options={"sise": 1}), r"\.options=.* \(got an unexpected.*size"),
        (config_of("blackjack", options={"a": 1}), r"\.options=.*kind=blackjack does not"),
    ],
)
def test_what_cannot_be_made_is_refused(config: EnvironmentConfig, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        build_environment_factory(config)()


def test_only_embedded_environments_run_in_the_rank() -> None:
    assert isinstance(build_pool(config_of("blackjack", processes=0)), LocalPool)
    with pytest.raises(ConfigError, match=r"environment\.processes=0 with kind=custom: only num"):
        build_pool(replace(of_user("Steps"), processes=0))
