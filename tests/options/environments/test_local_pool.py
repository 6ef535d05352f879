"""The pool in this process: failures are replies, and ended episodes are forgotten."""

import math
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhf.options.environments.interface import (
    InvalidAnswerError,
    Observation,
    Reply,
    Step,
    parse_step,
)
from rlhf.options.environments.keys import FailureName
from rlhf.options.environments.process_pool import LocalPool


class Does:
    """Answer every turn with what a function returns."""

    def __init__(self, answer: Callable[[], Any]) -> None:
        self.answer = answer

    def reset(self, *, seed, row):
        return f"begin {seed}"

    def step(self, text):
        return self.answer()


def interrupt() -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("answer", "failure", "problem"),
    [
        (lambda: 1 / 0, FailureName.exception, "ZeroDivisionError: division by zero"),
        (lambda: Step("a", reward=10**400), FailureName.invalid, "the reward is inf"),
        (lambda: Step("a", reward=-(10**400)), FailureName.invalid, "the reward is -inf"),
        (lambda: "a", FailureName.invalid, "step returned a str"),
        (lambda: Observation("a"), FailureName.invalid, "step returned a Observation"),
        (lambda: Step("a", info={"success": 1}), FailureName.invalid, r"info['success'] is 1"),
        (lambda: Step("a", info={"x": "y" * 2**20}), FailureName.invalid, "info has 10485"),
    ],
)
def test_what_misbehaves_is_a_failure_of_its_episode(
    answer: Callable[[], Any], failure: FailureName, problem: str
) -> None:
    pool = LocalPool(lambda: Does(answer))
    pool.reset(1, seed=1, row={})
    pool.reset(2, seed=2, row={})
    pool.step(1, "a")
    *begun, failed = pool.replies(wait=True)
    assert begun == [Reply(seed, Step(Observation(f"begin {seed}"))) for seed in (1, 2)]
    assert (failed.episode, failed.failure) == (1, failure)
    assert failed.problem.startswith(problem)
    with pytest.raises(KeyError):
        pool.step(1, "a")


def test_an_interrupt_of_the_run_is_no_failure() -> None:
    pool = LocalPool(lambda: Does(interrupt))
    pool.reset(1, seed=1, row={})
    with pytest.raises(KeyboardInterrupt):
        pool.step(1, "a")


ANY = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.just(Observation("a"))
)


@given(st.lists(ANY | st.dictionaries(st.text(), ANY), max_size=6).map(tuple) | ANY)
def test_any_answer_is_a_step_or_invalid(answer: Any) -> None:
    try:
        step = parse_step(answer)
    except InvalidAnswerError:
        return
    assert parse_step(step) == step
    assert math.isfinite(step.reward)
    assert isinstance(step.observation, Observation)
