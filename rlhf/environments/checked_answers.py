"""Check what environments return, and turn whatever they raise into a failure."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from numbers import Real
from typing import Any

from rlhf.base.finite_numbers import float_or_infinity
from rlhf.base.user_code import failure_reason
from rlhf.config.choices import FailureName
from rlhf.config.schema.keys import LARGEST_SCORE
from rlhf.environments.interface import Observation, Reply, Step, as_observation

LONGEST_TEXT = 10**6  # characters of an observation, and of an info as JSON
ROLES = ("user", "tool")
FIELDS = len(Step._fields)


class InvalidAnswerError(Exception):
    """An answer that is no observation or no step; its message says why in one line."""


def reply_of(episode: int, call: Callable[[], Step]) -> Reply:
    """Return the reply that a call of an environment gives, a failure included."""
    try:
        return Reply(episode, call())
    except InvalidAnswerError as error:
        return failed(episode, FailureName.invalid, str(error))
    except (Exception, SystemExit) as error:
        return failed(episode, FailureName.exception, failure_reason(error, None))


def failed(episode: int, failure: FailureName, problem: str) -> Reply:
    """Return the reply for a call that failed; its step has no content."""
    return Reply(episode, Step(Observation("")), failure, problem)


def checked_observation(answer: Any) -> Observation:
    """Return what ``reset`` or a step returned as an observation, or raise InvalidAnswerError."""
    found = as_observation(answer)
    if not isinstance(found.text, str):
        kind = type(found.text).__name__
        raise InvalidAnswerError(f"the observation is a {kind}: must be a str or an Observation")
    if found.role not in ROLES:
        raise InvalidAnswerError(
            f"the role of the observation is {found.role!r:.40}: must be in {ROLES}"
        )
    if len(found.text) > LONGEST_TEXT:
        raise InvalidAnswerError(
            f"the observation has {len(found.text)} characters > {LONGEST_TEXT}"
        )
    try:
        found.text.encode()
    except UnicodeEncodeError as error:  # half of a character, which no tokenizer takes
        raise InvalidAnswerError("the observation is no Unicode text") from error
    return found


def checked_step(answer: Any) -> Step:
    """Return what ``step`` returned, or raise InvalidAnswerError; gymnasium's tuple will do."""
    if not isinstance(answer, tuple) or isinstance(answer, Observation):
        raise InvalidAnswerError(f"step returned a {type(answer).__name__}: must be a Step")
    if not 1 <= len(answer) <= FIELDS:
        raise InvalidAnswerError(f"step returned {len(answer)} values: must be a Step")
    step = Step(*answer)
    reward = step.reward
    if isinstance(reward, bool) or not isinstance(reward, Real):
        raise InvalidAnswerError(f"the reward is a {type(reward).__name__}: must be a number")
    if not abs(value := float_or_infinity(reward)) <= LARGEST_SCORE:
        raise InvalidAnswerError(f"the reward is {value}: must be a finite number up to 1e15")
    for name in ("terminated", "truncated"):
        if not _is_bool(getattr(step, name)):
            kind = type(getattr(step, name)).__name__
            raise InvalidAnswerError(f"{name} is a {kind}: must be True or False")
    return Step(
        checked_observation(step.observation),
        value,
        bool(step.terminated),
        bool(step.truncated),
        _checked_info(step.info),
    )


def _checked_info(info: Any) -> dict[str, Any]:
    """Return an info as the JSON that it becomes between processes."""
    if not isinstance(info, Mapping):
        raise InvalidAnswerError(f"info is a {type(info).__name__}: must be a dict")
    found = dict(info)
    for name in {"success", "malformed"} & found.keys():
        if not _is_bool(found[name]):
            raise InvalidAnswerError(
                f"info[{name!r}] is {found[name]!r:.40}: must be True or False"
            )
        found[name] = bool(found[name])
    line = json.dumps(found, default=str, skipkeys=True)
    if len(line) > LONGEST_TEXT:
        raise InvalidAnswerError(f"info has {len(line)} characters > {LONGEST_TEXT}")
    return dict(json.loads(line))


def _is_bool(value: Any) -> bool:
    return isinstance(value, bool) or str(getattr(value, "dtype", "")) == "bool"  # or NumPy's
