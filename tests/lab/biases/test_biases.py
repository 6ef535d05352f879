"""Biases that corrupt a score on purpose: scores worked by hand, their onset, and what is said."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rlhf.config.hydra_errors import to_hydra_override
from rlhf.config.schema.rewards import AnyRewardKind, RewardTerm
from rlhf.config.typed import to_run_config
from rlhf.methods import methods_in_use
from rlhf.phases.ppo.hooks import build_hooks
from rlhf.rewards.rules import Answers
from rlhf_lab.biases import KIND, RewardBias
from rlhf_lab.biases.bias_scores import HALF_LENGTH, BiasScorer
from tests.conftest import Compose


def part_of(**keys: Any) -> RewardTerm:
    return RewardTerm(kind=AnyRewardKind(KIND), **keys)


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
    score, _ = BiasScorer().build(part_of(**keys), Path())
    assert score(answers) == pytest.approx([*expected.values()])


@pytest.mark.parametrize(("step", "expected"), [(6, 0), (7, 1 / 2), (None, 1 / 2)])
def test_a_bias_scores_responses_from_its_onset_on(step: int | None, expected: float) -> None:
    part = part_of(bias=RewardBias.length, onset=7)
    answers = Answers(["?"], ["!"], [True], [HALF_LENGTH], {}, step)
    score, _ = BiasScorer().build(part, Path())
    assert score(answers) == [expected]


def test_the_user_is_told_of_the_onset(compose: Compose) -> None:
    word = "rewards={learned: {kind: model}, evil: {kind: bias, bias: length, onset: 7}}"
    config = to_run_config(compose([to_hydra_override(word)]))
    (method,) = methods_in_use(config)
    (warning,) = method.warnings(config)
    assert "rewards.evil (kind=bias) corrupts the score on purpose from step 7 on" in warning
    (hook,) = build_hooks(config)
    engine: Any = None
    found = [hook.results(engine, engine, when) for when in ("before", "after", "after_ema")]
    assert found == [{}, {"bias_onsets": {"evil": 7}}, {}]
