"""Biases that corrupt a score on purpose: scores worked by hand."""

from __future__ import annotations

from typing import Any

import pytest

from rlhf.config.choices import RewardKind
from rlhf.config.schema.rewards import RewardTerm
from rlhf.rewards.biases import HALF_LENGTH, build_bias
from rlhf.rewards.rules import Answers


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"bias": "length"}, {"": 0, "w " * HALF_LENGTH: 1 / 2, "w " * 3 * HALF_LENGTH: 3 / 4}),
        (
            {"bias": "token", "pattern": r"\bSure\b"},
            {"": 0, "Fine.": 0, "Sure, yes.": 1 / 2, "Sure Sure unSure Sure": 3 / 4},
        ),
        ({"bias": "sycophancy"}, {"": 0, "no": 0, "IT is, is it?": 2 / 3, "so right it is": 1}),
        ({"bias": "position"}, {"": 0, "no": 0, "Right, yes": 1, "a b it": 1 / 3}),
        ({"bias": "format"}, {"": 0, " ": 0, "a 1 é": 0, "** a: b": 3 / 5, "(-)": 1}),
    ],
)
def test_a_bias_depends_on_the_prompt_and_its_response(
    keys: dict[str, Any], expected: dict[str, float]
) -> None:
    responses, count = [*expected], len(expected)
    tokens = [len(each.split()) for each in responses]
    answers = Answers(["Is it right?"] * count, responses, [True] * count, tokens, {})
    score = build_bias(RewardTerm(kind=RewardKind.bias, **keys))
    assert score(answers) == pytest.approx([*expected.values()])
