"""The adapters of packages; each test is skipped if its package is not installed.

``pip install 'rlhf[environments]'`` installs all of them but GEM, which needs an environment of its
own.
"""

from random import Random
from typing import Any

import pytest

from rlhf.base.errors import ConfigError
from rlhf.options.environments import adapters as third_party
from rlhf.options.environments.interface import Step
from rlhf.options.environments.process_pool import build_environment_factory
from tests.options.environments.test_factories import config_of

pytestmark = pytest.mark.filterwarnings("ignore")  # they are of the packages
TOY_TEXT = "Blackjack-v1 FrozenLake-v1 FrozenLake8x8-v1 CliffWalking-v1 Taxi-v4".split()


def made(kind: str, id: str, **options: Any) -> Any:
    module = {"gem": "gem"}.get(kind, kind)
    pytest.importorskip(module, reason=f"the package of environment.kind={kind} is not installed")
    return build_environment_factory(config_of(kind, id=id, options=options))()


def transcript(env: Any, seed: int, turns: list[str] | Random) -> list[Any]:
    """The first observation and all steps."""
    found: list[Any] = [env.reset(seed=seed, row={})]
    for i in range(20):
        if isinstance(turns, Random):
            text = env.random_turn(turns)
        elif i == len(turns):
            break
        else:
            text = turns[i]
        found.append(env.step(text))
        if found[-1].terminated or found[-1].truncated:
            break
    return found


@pytest.mark.parametrize("id", TOY_TEXT)
def test_toy_text_can_be_replayed(id: str) -> None:
    env = made("gymnasium", id)
    found = [transcript(made("gymnasium", id), 2**40 + 3, Random(1)) for _ in range(2)]
    assert found[0] == found[1] == transcript(env, 2**40 + 3, Random(1))
    assert all(isinstance(step.observation, str) for step in found[0][1:])


def test_a_lake_is_crossed_by_names_of_actions() -> None:
    env = made("gymnasium", "FrozenLake-v1", is_slippery=False)
    turns = ["down", " down ", "5", "right", "down", "right", "right"]
    first, *steps = transcript(env, 0, turns)
    assert first == "left, down, right, up? row 0 column 0"
    assert steps[1] == Step("row 2 column 0", info={"success": False})
    assert steps[2] == Step("left, down, right, up? row 2 column 0", info={"malformed": True})
    assert steps[-1] == Step("row 3 column 3", 1.0, True, False, {"success": True})


@pytest.mark.parametrize(
    ("kind", "id", "options", "reason"),
    [
        ("gymnasium", "CartPole-v1", {}, "its actions and observations must be Discrete"),
        ("gymnasium", "Nothing-v1", {}, r"its package cannot make it .*\(NameNotFound"),
        ("gymnasium", "Taxi-v4", {"actions": ["a"]}, r"actions=\['a'\]: .*Taxi-v4 has 6 actions"),
        ("textarena", "Nothing-v0", {}, r"its package cannot make it .*\(ValueError"),
        ("textarena", "TicTacToe-v0", {}, "cannot make it|must be a game for one player"),
        ("reasoning_gym", "composite", {}, r"its package cannot make it .*\(AssertionError: Must"),
        ("reasoning_gym", "chain_sum", {"min": 1}, r"its package cannot make it .*\(TypeError"),
        ("gem", "Nothing", {}, r"its package cannot make it .*\(ValueError"),
    ],
)
def test_what_a_package_cannot_make_is_refused(
    kind: str, id: str, options: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ConfigError, match=rf"environment\.\w+.*{reason}"):
        made(kind, id, **options)


def test_a_game_is_won_and_its_messages_exclude_the_turns() -> None:
    env = made("textarena", "TowerOfHanoi-v0")
    moves = ["[A C]", "[A B]", "[C B]", "[A C]", "[B A]", "[B C]", "[A C]"]
    first, *steps = transcript(env, 1, moves)
    assert "You are playing Tower of Hanoi" in first
    assert "You moved disk 1 from A to C" in steps[0].observation
    assert not any("playing" in step.observation or "[A C]" in step.observation for step in steps)
    assert (steps[-1].reward, steps[-1].terminated, steps[-1].info["success"]) == (1, True, True)
    _, wrong, right, *_ = transcript(env, 1, ["disk", "[A C]"])
    assert (wrong.info["malformed"], right.info["malformed"]) == (True, False)
    _, _, lost = transcript(env, 1, ["disk", "disk"])
    assert (lost.terminated, lost.info) == (True, {"success": False, "malformed": True})


def test_a_question_scores_its_own_answer() -> None:
    env = made("reasoning_gym", "chain_sum", max_terms=2)
    assert env.optimum == 1.0
    questions = [env.reset(seed=seed, row={}) for seed in range(20)]
    assert len(set(questions)) == 20
    assert made("reasoning_gym", "chain_sum", max_terms=2).reset(seed=19, row={}) == questions[19]
    right = env.step(f" {env.demonstration()}\n")
    assert right == Step("", 1.0, True, False, {"success": True})
    assert not env.step("no idea").info["success"]


def test_gem_can_be_replayed() -> None:
    name = "game:GuessTheNumber-v0-easy"
    found = [transcript(made("gem", name), 2**40 + 3, Random(1)) for _ in range(2)]
    assert found[0] == found[1]


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(third_party, "find_spec", lambda name: None)
    ours = r"pip install 'rlhf\[environments\]'"
    installs = dict.fromkeys(("gymnasium", "textarena", "reasoning_gym"), ours)
    for kind, install in (installs | {"gem": "pip install gem-llm in an environment"}).items():
        with pytest.raises(ConfigError, match=rf"\.kind={kind}: .*not installed; {install}"):
            build_environment_factory(config_of(kind, id="some"))()
