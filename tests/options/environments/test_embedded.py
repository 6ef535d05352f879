"""The embedded environments: equal replays, optimal players, and turns that cannot be read."""

import re
from collections.abc import Callable
from random import Random
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from rlhf.base.errors import ConfigError
from rlhf.options.environments.embedded import (
    Blackjack,
    Calculator,
    NumberGuessing,
    evaluate_arithmetic,
)
from rlhf.options.environments.interface import Step

EMBEDDED: list[Callable[[], Any]] = [
    NumberGuessing,
    Blackjack,
    Calculator,
    lambda: Calculator(tool=False, terms=4),
]
Play = Callable[[Any, str], str]


def expert(env: Any, observation: str) -> str:
    return env.demonstration()


def at_random(seed: int) -> Play:
    rng = Random(seed)
    return lambda env, _: env.random_turn(rng)


def episode(env: Any, seed: int, play: Play, turns: int = 30) -> list[tuple[str, Step]]:
    """Turns of the player and what they led to, up to the end of the episode."""
    observation = env.reset(seed=seed, row={})
    found: list[tuple[str, Step]] = []
    for _ in range(turns):
        text = play(env, observation)
        step = env.step(text)
        found.append((text, step))
        observation = step.observation if isinstance(step.observation, str) else step[0].text
        if step.terminated or step.truncated:
            return found
    raise AssertionError("the episode has no end")


def mean_return(env: Any, play: Play, episodes: int) -> float:
    total = sum(step.reward for seed in range(episodes) for _, step in episode(env, seed, play))
    return total / episodes


@pytest.mark.parametrize("make", EMBEDDED)
def test_the_same_seed_gives_the_same_episode(make: Callable[[], Any]) -> None:
    """Asking the expert changes nothing, and the expert writes nothing malformed."""
    env = make()

    def constant(env: Any, _: str) -> str:
        return "stick" if isinstance(env, Blackjack) else "3"

    def asks_before(env: Any, observation: str) -> str:
        env.demonstration()
        return constant(env, observation)

    for seed in range(50):
        steps = episode(env, seed, expert)
        assert steps == episode(make(), seed, expert)
        assert not any(step.info.get("malformed") for _, step in steps)
        assert episode(env, seed, at_random(seed)) == episode(make(), seed, at_random(seed))
        assert episode(make(), seed, asks_before) == episode(make(), seed, constant)
    assert len({make().reset(seed=seed, row={}) for seed in range(50)}) > 1 or make is EMBEDDED[0]


@pytest.mark.parametrize("make", EMBEDDED)
@given(seed=st.integers(0, 2**63), text=st.text(max_size=30))
@example(seed=0, text="0\x1f")
def test_any_text_is_answered(make: Callable[[], Any], seed: int, text: str) -> None:
    env = make()
    observation = env.reset(seed=seed, row={})
    assert 0 < len(observation) <= 40
    step = env.step(text)
    assert -1 <= step.reward <= env.optimum or step.reward == 1
    assert step.info["success"] in (True, False)


class Bisection:
    """The player that halves what is left of the bounds."""

    def __init__(self, env: NumberGuessing, observation: str) -> None:
        self.low, self.high = map(int, re.findall(r"-?\d+", observation))
        self.guess = 0

    def __call__(self, env: NumberGuessing, observation: str) -> str:
        if observation == "higher":
            self.low = self.guess + 1
        elif observation == "lower":
            self.high = self.guess - 1
        self.guess = (self.low + self.high) // 2
        return str(self.guess)


def bisect(env: NumberGuessing, seed: int) -> float:
    player = Bisection(env, env.reset(seed=seed, row={}))
    return sum(step.reward for _, step in episode(env, seed, player))


def test_bisection_reaches_the_optimum_of_number_guessing() -> None:
    env = NumberGuessing()
    assert env.optimum == 1.0
    assert all(bisect(env, seed) == 1 for seed in range(300))
    assert 0.3 < mean_return(env, at_random(0), 500) < 0.5
    assert 0.6 < mean_return(env, expert, 500) < 0.9, "the expert leaves something to gain"


def test_too_few_guesses_lower_the_optimum() -> None:
    env = NumberGuessing(low=1, high=20, guesses=3)
    assert env.optimum == 7 / 20
    assert abs(sum(bisect(env, seed) for seed in range(4000)) / 4000 - 7 / 20) < 0.03


def test_a_malformed_guess_costs_a_turn() -> None:
    env = NumberGuessing()
    env.reset(seed=0, row={})
    steps = [env.step(text) for text in ("five", "5.", "", "9" * 5000)]
    assert [step.info["malformed"] for step in steps] == [True] * 4
    assert [step.terminated for step in steps] == [False, False, False, True]


def test_the_calculator_answers_calls_and_scores_the_answer() -> None:
    env = Calculator()
    question = env.reset(seed=3, row={}).removesuffix("=?")
    answer = str(eval(question))
    assert re.fullmatch(r"\d+[-+*]\d+", question)
    step = env.step(f"calc {question}")
    assert (step.observation, step.reward, step.terminated) == ((answer, "tool"), 0, False)
    assert env.step("calc 2 + 3*4").observation == ("14", "tool")
    wrong = env.step("calc 2 + x")
    assert (wrong.observation, wrong.info["malformed"]) == (("error", "tool"), True)
    assert env.step(f" {answer}\n")[1:4] == (1.0, True, False)
    env.reset(seed=3, row={})
    assert env.step(f"{answer} of course")[1:3] == (0.0, True)


def test_calling_the_tool_reaches_the_optimum_and_the_expert_does_not() -> None:
    def calls(env: Calculator, observation: str) -> str:
        return f"calc {observation[:-2]}" if observation.endswith("=?") else observation

    assert mean_return(Calculator(terms=3), calls, 200) == Calculator.optimum == 1
    assert 0.5 < mean_return(Calculator(), expert, 500) < 0.75
    without = Calculator(tool=False)
    assert mean_return(without, expert, 500) < 0.2
    without.reset(seed=3, row={})
    assert without.step("calc 1+1").observation == ("no tool", "tool")


@given(st.lists(st.integers(0, 10**9 - 1), min_size=1, max_size=8), st.randoms())
def test_arithmetic_equals_pythons(numbers: list[int], rng: Random) -> None:
    expression = "".join(f"{rng.choice('+-*')}{number}" for number in numbers)[1:]
    assert evaluate_arithmetic(expression) == eval(expression)


@pytest.mark.parametrize(
    ("game", "options"),
    [
        *((NumberGuessing, options) for options in ({"low": 3, "high": 2}, {"guesses": 0})),
        *((Calculator, options) for options in ({"largest": 0}, {"terms": 1}, {"operations": "/"})),
    ],
)
def test_impossible_games_are_refused(game: Any, options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"environment\.options\.\w+=./?: must be"):
        game(**options)
