"""Rewards by rule."""

from pathlib import Path
from typing import Any

import pytest

from rlhf.base.errors import ConfigError
from rlhf.config.choices import RewardKind
from rlhf.config.schema.rewards import RewardTerm
from rlhf.rewards.rules import RULES, Answers, find_last_number


def scores(responses: list[str], wanted: list[Any] | None = None, **keys: Any) -> list[float]:
    part = RewardTerm(columns=["answer"] if wanted else [], **keys)
    answers = Answers(
        prompts=["?"] * len(responses),
        responses=responses,
        ended=[not each.endswith("...") for each in responses],
        tokens=[len(each.split()) for each in responses],
        columns={"answer": wanted} if wanted else {},
    )
    return list(RULES[part.kind](part)(answers))


def words(count: int) -> str:
    return " ".join(["word"] * count)


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"most": 4}, [1, 1, 1, 0, 0]),
        ({"least": 3, "most": 4}, [0, 1, 1, 0, 0]),
        ({"least": 3}, [0, 1, 1, 1, 1]),
        ({"most": 4, "slack": 4}, [1, 1, 1, 0.5, 0]),
    ],
)
def test_length_counts_tokens(keys: dict[str, int], expected: list[float]) -> None:
    responses = [words(count) for count in (2, 3, 4, 6, 9)]
    assert scores(responses, kind=RewardKind.length, **keys) == expected


def test_length_with_slack_is_the_soft_overlong_punishment() -> None:
    """https://arxiv.org/abs/2503.14476 equation 13, plus 1."""

    def punished(tokens: int, longest: int, cache: int) -> float:
        if tokens <= longest - cache:
            return 0.0
        return (longest - cache - tokens) / cache if tokens <= longest else -1.0

    counts = range(1, 13)
    found = scores([words(n) for n in counts], kind=RewardKind.length, most=6, slack=4)
    assert found == pytest.approx([1 + punished(n, longest=10, cache=4) for n in counts])


def test_stop_asks_whether_the_response_ended() -> None:
    assert scores(["done", "and so on..."], kind=RewardKind.stop) == [1, 0]


def test_a_pattern_is_found_or_matches_the_whole() -> None:
    responses = ["see <b>this</b>", " <b>this</b>\n", "nothing"]
    pattern = {"kind": RewardKind.pattern, "pattern": "<b>.*</b>"}
    assert scores(responses, **pattern) == [1, 1, 0]
    assert scores(responses, whole=True, **pattern) == [0, 1, 0]


def test_exact_ignores_white_space_at_the_ends_only() -> None:
    responses, wanted = [" yes\n", "yes.", "no", "12"], ["yes", "yes", "yes ", 12]
    assert scores(responses, wanted, kind=RewardKind.exact) == [1, 0, 0, 1]


def test_numbers_are_compared_by_value() -> None:
    responses = ["3 + 4 = 7", "so 1,250.0 of them", "minus -2", "none", "7"]
    wanted = ["#### 7", 1250, "-2.0", 3, None]
    assert scores(responses, wanted, kind=RewardKind.number) == [1, 1, 1, 0, 0]


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("3-5", 5), ("10-4", 4), ("\u22127", -7), ("-7", -7), ("x=-7", -7), ("1.5e3", 1500),
        ("2E-2", 0.02), ("1 000", 0), ("1,2,3", 3), ("1,2", 2), ("1,200", 1200), (".5", 0.5),
        ("$1,200.00", 1200), ("\\boxed{-3}", -3), ("#### 1,200", 1200), ("18.", 18), ("none", None),
        ("12,3456", 3456), ("(-4)", -4), (".5 and -.25", -0.25), ("-1,234,567.5", -1234567.5),
    ],
)  # fmt: skip
def test_numbers_follow_the_documented_grammar(text: str, number: float | None) -> None:
    assert find_last_number(text) == number


@pytest.mark.parametrize("text", ["NaN", "Infinity", "-Infinity", '{"a": NaN}', "[1, -Infinity]"])
def test_json_has_no_constants_of_python(text: str) -> None:
    assert scores([text, "null"], kind=RewardKind.json) == [0, 1]


def test_json_follows_its_schema(tmp_path: Path) -> None:
    file = tmp_path / "schema.json"
    file.write_text('{"type": "object", "required": ["name"]}')
    responses = ['{"name": 1}', "[1]", "no json", "[" * 9999]
    assert scores(responses, kind=RewardKind.json) == [1, 1, 0, 0]
    assert scores(responses, kind=RewardKind.json, json_schema=str(file)) == [1, 0, 0, 0]
    for text in ("{", '{"type": 3}'):
        file.write_text(text)
        with pytest.raises(ConfigError, match="cannot be read as a JSON schema"):
            scores([""], kind=RewardKind.json, json_schema=str(file))
