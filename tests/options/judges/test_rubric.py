"""Rubrics: what is refused, what a judge is asked, and which of its answers are verdicts."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from rlhf.base.errors import ConfigError, RewardError
from rlhf.base.packaged_yaml import read_yaml_beside
from rlhf.options.judges.rubric import read_rubric
from tests.options.judges.judge_server import write_rubric

VERDICTS = read_yaml_beside(__file__, "verdicts.yaml")
ONE = "criteria: [{name: clear, question: Is it clear?%s}]"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("criteria: []", "criteria=[]: List should have at least 1 item"),
        ("preamble: x", "criteria: Field required"),
        ("[", "cannot be read (ParserError"),
        ("a text", "Input should be a valid dictionary"),
        (ONE % ", weight: -1", "criteria[0].weight=-1: Input should be greater than 0"),
        (ONE % ", weight: .inf", "criteria[0].weight=inf: Input should be a finite number"),
        (ONE % ", wieght: 2", "criteria[0].wieght=2: Extra inputs are not permitted"),
        (ONE % ", scale: [1]", "criteria[0].scale[1]: Field required"),
        (ONE % ", scale: [5, 5]", "criteria[0].scale=[5, 5]: must be two different numbers"),
        (ONE % ", scale: [1, .nan]", "criteria[0].scale[1]=nan: Input should be a finite number"),
        ("criteria: [{name: a b, question: x}]", "criteria[0].name='a b': String should match"),
        ("criteria: [{name: a}]", "criteria[0].question: Field required"),
        (
            "criteria: [{name: a, question: x}, {name: a, question: y}]",
            "two criteria have the name a",
        ),
        (ONE % "" + "\ntemplate: $prompt $criteria", "must have $prompt, $responses and $criteria"),
        (ONE % "" + "\ntemplate: $prompt $responses $criteria $5", "must have $prompt"),
    ],
)
def test_a_faulty_rubric_is_refused_with_place_value_and_rule(
    text: str, message: str, tmp_path: Path
) -> None:
    file = write_rubric(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        read_rubric(file)
    assert str(caught.value).startswith(f"rubric={file}: ")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_request_has_the_questions_their_scales_and_the_texts_as_they_are(tmp_path: Path) -> None:
    rubric = read_rubric(write_rubric(tmp_path))
    system, user = rubric.build_messages("Why $prompt?", ["It costs $5 {x} </response>"])
    assert system["content"] == rubric.preamble
    assert "<prompt>\nWhy $prompt?\n</prompt>" in user["content"]
    assert "<response>\nIt costs $5 {x} </response>\n</response>" in user["content"]
    assert "- clear (a number from 1, the worst, to 5, the best): Is it clear?" in user["content"]
    assert "- short (a number from 10, the worst, to 0, the best)" in user["content"]
    assert user["content"].endswith('nothing else: {"clear": ..., "short": ...}')
    pair = rubric.build_messages("Why?", ["one", "two"])[1]["content"]
    assert "<response_A>\none\n</response_A>\n<response_B>\ntwo\n</response_B>" in pair
    assert '- clear ("A", "B" or "tie": which response is better): Is it clear?' in pair


def test_words_of_a_rubric_replace_ours(tmp_path: Path) -> None:
    template = 'template: "$$5 for: $criteria $responses $prompt"'
    text = f"{ONE % ''}\npreamble: You are strict.\n{template}"
    system, user = read_rubric(write_rubric(tmp_path, text)).build_messages("p", ["r"])
    assert system["content"] == "You are strict."
    assert user["content"].startswith("$5 for: - clear")
    assert user["content"].endswith("</response> p")


@pytest.mark.parametrize("answered", VERDICTS, ids=lambda row: row["answer"])
def test_only_a_valid_number_for_each_criterion_is_a_verdict(
    answered: dict[str, Any], tmp_path: Path
) -> None:
    rubric, verdict = read_rubric(write_rubric(tmp_path)), answered["verdict"]
    read = partial(
        rubric.read_verdict, answered["answer"], compares=answered.get("compares", False)
    )
    if isinstance(verdict, str):
        with pytest.raises(RewardError) as caught:
            read()
        assert verdict in str(caught.value)
    else:
        assert read() == verdict


def test_the_score_is_the_weighted_mean(tmp_path: Path) -> None:
    rubric = read_rubric(write_rubric(tmp_path))
    assert rubric.weigh({"clear": 1, "short": 0}) == 0.75
