"""Rewards by rule: each builder returns a ``ScoreFunction`` whose scores lie between 0 and 1."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from rlhf.base.errors import ConfigError
from rlhf.base.foreign_errors import require_package, translate_errors
from rlhf.base.user_paths import expand_user_path, read_user_text
from rlhf.config.choices import RewardKind
from rlhf.config.schema.rewards import RewardTerm


class Answers(NamedTuple):
    """A batch of responses; row i of every field belongs to response i."""

    prompts: Sequence[str]
    responses: Sequence[str]
    ended: Sequence[bool]  # True if an end token or stop text ended the response
    tokens: Sequence[int]  # numbers of response tokens, the end token included
    columns: Mapping[str, Sequence[Any]]  # the dataset columns that the part reads, by name
    step: int | None = None  # PPO's step, from 1; None for held-out prompts, and before training


class PartScores(NamedTuple):
    """Scores of a batch of responses; NaN for a response that the part failed to score."""

    scores: Sequence[float]
    criteria: Mapping[str, Sequence[float]] = {}  # scores by criterion, of a part that has criteria
    problem: str = ""  # the reason of the first failure, if the part returns it
    steps: Sequence[Sequence[tuple[int, float]]] = ()
    """The steps of each response, of a part that scores steps: the character at which the step
    ends, and the step's share of the score."""


ScoreFunction = Callable[[Answers], Sequence[float] | PartScores]


# A minus after a digit, a letter or a bracket is not a sign: "3-5" has the numbers 3 and 5.
NUMBER = re.compile(
    r"(?:(?<![\w.)\]}])[-\u2212])?"
    r"(?:(?:\d{1,3}(?:,\d{3})+(?![,\d])|\d+)(?:\.\d+)?|\.\d+)(?:[eE][-+\u2212]?\d+)?"
)


def build_length_rule(part: RewardTerm) -> ScoreFunction:
    """Return a rule that scores 1 if the response has ``least`` to ``most`` tokens.

    The score falls to 0 over ``slack`` tokens outside of this range.
    """
    most = math.inf if part.most is None else part.most

    def score(tokens: int) -> float:
        outside = max(part.least - tokens, tokens - most, 0)
        return max(0.0, 1 - outside / part.slack) if part.slack else float(outside == 0)

    return lambda answers: [score(tokens) for tokens in answers.tokens]


def build_stop_rule(_: RewardTerm) -> ScoreFunction:
    """Return a rule that scores 1 if an end token or stop text ended the response."""
    return lambda answers: [float(has_ended) for has_ended in answers.ended]


def build_pattern_rule(part: RewardTerm) -> ScoreFunction:
    """Return a rule: 1 if ``pattern`` matches a part (``whole``: all) of the stripped response."""
    expression = re.compile(str(part.pattern))
    find = expression.fullmatch if part.whole else expression.search
    return lambda answers: [float(find(each.strip()) is not None) for each in answers.responses]


def build_exact_rule(part: RewardTerm) -> ScoreFunction:
    """Return a rule that scores 1 if response and column are equal, apart from outer spaces."""
    return _build_column_rule(part, lambda response, wanted: response.strip() == wanted.strip())


def build_number_rule(part: RewardTerm) -> ScoreFunction:
    """Return a rule that scores 1 if the last numbers in the response and the column are equal.

    GSM8K's column ``answer`` ends in ``#### 42``, for example. ``find_last_number`` defines what
    counts as a number.
    """

    def matches(response: str, wanted: str) -> bool:
        number, expected = find_last_number(response), find_last_number(wanted)
        return number is not None and expected is not None and math.isclose(number, expected)

    return _build_column_rule(part, matches)


def build_json_rule(part: RewardTerm) -> ScoreFunction:
    """Return a rule that scores 1 if the response is JSON, and matches the schema if there is one.

    Raises:
        CapabilityError: if there is a schema, but the package jsonschema is missing.
        ConfigError: if the schema's file is missing, or is not a JSON schema.
    """
    check = _load_json_validator(part.json_schema)

    def score(response: str) -> float:
        try:
            return float(check(json.loads(response, parse_constant=_refuse_nan_and_infinity)))
        except (ValueError, ArithmeticError, RecursionError):  # 1e999 overflows, for example
            return 0.0

    return lambda answers: [score(each) for each in answers.responses]


RULES: dict[RewardKind, Callable[[RewardTerm], ScoreFunction]] = {
    RewardKind.length: build_length_rule,
    RewardKind.stop: build_stop_rule,
    RewardKind.pattern: build_pattern_rule,
    RewardKind.exact: build_exact_rule,
    RewardKind.number: build_number_rule,
    RewardKind.json: build_json_rule,
}


def find_last_number(text: str) -> float | None:
    """Return the last number in the text; None if there is none.

    A number has digits, which commas may group by three, and optionally a sign (- or U+2212), a
    decimal point and an exponent: 1,200.50, .5, -1.5e3. Spaces end a number.
    """
    numbers = NUMBER.findall(text)
    return float(numbers[-1].replace(",", "").replace("\u2212", "-")) if numbers else None


def _refuse_nan_and_infinity(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _build_column_rule(part: RewardTerm, matches: Callable[[str, str], bool]) -> ScoreFunction:
    (column,) = part.columns

    def score_answers(answers: Answers) -> list[float]:
        pairs = zip(answers.responses, answers.columns[column], strict=True)
        return [float(matches(response, str(expected))) for response, expected in pairs]

    return score_answers


def _load_json_validator(file: str | None) -> Callable[[Any], bool]:
    if file is None:
        return lambda _: True
    with require_package("json_schema", "jsonschema", "pip install 'rlhf[json]'"):
        from jsonschema.validators import validator_for

    def build_schema_error(reason: str) -> ConfigError:
        return ConfigError(f"json_schema={file}: cannot be read as a JSON schema ({reason})")

    with translate_errors(build_schema_error):
        schema = json.loads(read_user_text(expand_user_path(file, key="json_schema")))
        validator = validator_for(schema)
        validator.check_schema(schema)
        valid: Callable[[Any], bool] = validator(schema).is_valid
    return valid
