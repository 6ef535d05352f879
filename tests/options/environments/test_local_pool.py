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


INVALID = [  # answers, and why they are invalid
    (Step("a", reward=10**400), "the reward is inf"),
    (Step("a", reward=-(10**400)), "the reward is -inf"),
    (("a", "1"), "the reward is a str: must be a number"),
    (("a", True), "the reward is a bool: must be a number"),
    ("a", "step returned a str"),
    (None, "step returned a NoneType: must be a Step"),
    (Observation("a"), "step returned a Observation"),
    (("a", 0.0, False, False, {}, 1), "step returned 6 values: must be a Step"),
    ((5, 0.0), "the observation is a int: must be a str or an Observation"),
    (("a", 0.0, 1), "terminated is a int: must be True or False"),
    ((Observation("a", "system"), 0.0), "the role of the observation is 'system': must be in ('"),
    (("a", 0.0, False, False, 3), "info is a int: must be a dict"),
    (Step("a", info={"success": 1}), r"info['success'] is 1"),
    (Step("a", info={"x": "y" * 2**20}), "info has 10485"),
]


@pytest.mark.parametrize(("answer", "problem"), INVALID, ids=[problem for _, problem in INVALID])
def test_an_answer_that_is_no_step_is_invalid(answer: Any, problem: str) -> None:
    with pytest.raises(InvalidAnswerError) as caught:
        parse_step(answer)
    assert str(caught.value).startswith(problem)


def test_what_misbehaves_is_a_failure_of_its_episode() -> None:
    pool = LocalPool(lambda: Does(lambda: 1 / 0))
    pool.reset(1, seed=1, row={})
    pool.reset(2, seed=2, row={})
    pool.step(1, "a")
    *begun, failed = pool.replies(wait=True)
    assert begun == [Reply(seed, Step(Observation(f"begin {seed}"))) for seed in (1, 2)]
    assert (failed.episode, failed.failure) == (1, FailureName.exception)
    assert failed.problem == "ZeroDivisionError: division by zero"
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
