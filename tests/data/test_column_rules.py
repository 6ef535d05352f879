"""What the columns language says is what is done, and what it cannot say is refused by its key."""

from __future__ import annotations

from typing import Any

import pytest

from rlhf.data.column_rules import parse_columns
from rlhf.data.detect import Converted
from rlhf.data.layouts import Row
from rlhf.data.records import Record
from rlhf.errors import ConfigError, DataError

KEY = "data.sets.pets.columns"


def convert(columns: dict[str, Any], *values: dict[str, Any]) -> Converted:
    rows = [Row("pets.jsonl", number, row) for number, row in enumerate(values, 1)]
    return parse_columns(columns, key=KEY).convert(rows, source="pets.jsonl")


def made(rule: Any, **row: Any) -> str | None:
    """The text that ``rule`` makes of one row."""
    (record,) = convert({"text": rule}, row).records
    return record.text


# -------------------------------------------------------------------------------------------- paths


@pytest.mark.parametrize(
    ("path", "row"),
    [
        ("a", {"a": "x"}),
        ("a.b", {"a": {"b": "x"}}),
        ("a[1]", {"a": ["y", "x"]}),
        ("a.zh_cn[0].text", {"a": {"zh_cn": [{"text": "x"}, {"text": "y"}]}}),
        ("a[0][1]", {"a": [["y", "x"]]}),
        ("回答-1", {"回答-1": "x"}),
    ],
)
def test_path_leads_to_its_value(path: str, row: dict[str, Any]) -> None:
    assert made(path, **row) == "x"
    assert made({"from": path}, **row) == "x"


@pytest.mark.parametrize(
    "row",
    [
        {"a": None},
        {"a": {"b": None}},
        {"a": {"b": []}},
        {"a": {"b": [None]}},
        {"a": {"b": [{"c": None}]}},
        {"a": {"b": [{"c": " \n"}]}},
        {"a": {"b": [{}]}},
        {"a": {}},
        {},
    ],
)
def test_part_is_absent_where_its_path_ends_early(row: dict[str, Any]) -> None:
    whole = {"a": {"b": [{"c": "x"}]}}
    converted = convert({"text": "a.b[0].c"}, whole, row)
    assert converted.records == [Record(text="x")]
    assert converted.left_out == {"text is null": 1}


@pytest.mark.parametrize("path", ["b", "a.c", "a.b[0].d"])
def test_path_that_no_row_has_is_refused(path: str) -> None:
    row = {"a": {"b": [{"c": "x"}]}, "z": 1}
    with pytest.raises(DataError) as refused:
        convert({"text": path}, row, row)
    assert str(refused.value) == (
        f"pets.jsonl: {KEY}.text reads '{path}', which no row has; the columns are a, z."
    )


@pytest.mark.parametrize(
    ("path", "value", "problem"),
    [
        ("a[0]", "x", r"'a\[0\]' does not fit: \[0\] wants a list and meets str\."),
        ("a[0]", {"b": 1}, r"'a\[0\]' does not fit: \[0\] wants a list and meets dict\."),
        ("a.b", ["x"], r"'a\.b' does not fit: 'b' wants an object and meets list\."),
        ("a", 5, r"'a' is of type int; it must be text or null\."),
        ("a", ["x"], r"'a' is of type list; it must be text or null\."),
    ],
)
def test_value_of_the_wrong_type_is_refused(path: str, value: Any, problem: str) -> None:
    with pytest.raises(
        DataError, match=rf"^pets\.jsonl, row 2: data\.sets\.pets\.columns\.text: {problem}"
    ):
        convert({"text": path}, {"a": None}, {"a": value})


# -------------------------------------------------------------------------------------------- steps


def test_after_keeps_what_follows_the_last_occurrence() -> None:
    rule = {"from": "a", "after": "Assistant:"}
    assert made(rule, a="Assistant: one Assistant: two") == " two"
    assert made(rule, a="no mark") == "no mark"


def test_after_that_leaves_nothing_makes_the_part_absent() -> None:
    converted = convert({"text": {"from": "a", "after": ":"}}, {"a": "x:"}, {"a": ":y"})
    assert converted.records == [Record(text="y")]
    assert converted.left_out == {"text is null": 1}


def test_remove_deletes_every_match() -> None:
    assert made({"from": "a", "remove": r" ?\[\d+\]"}, a="One [1], two[22].") == "One, two."


def test_steps_are_taken_in_the_documented_order() -> None:
    rule = {"remove": "x", "after": "xx", "from": "a"}
    assert made(rule, a="a xx b x") == " b "  # removing first would leave no xx to look for


def test_turn_wraps_what_a_human_says() -> None:
    converted = convert({"prompt": {"from": "q", "turn": "human"}}, {"q": " Hi?\n"}, {"q": ""})
    assert converted.records == [Record(prompt="\n\nHuman: Hi?\n\nAssistant:")]
    assert converted.left_out == {"prompt is null": 1}


VICUNA = {"USER": "Human", "ASSISTANT": "Assistant", "SYSTEM": "System"}


@pytest.mark.parametrize(
    ("text", "prompt"),
    [
        ("USER: a ASSISTANT:", "\n\nHuman: a\n\nAssistant:"),
        ("USER: a", "\n\nHuman: a\n\nAssistant:"),
        (" a ", "\n\nHuman: a\n\nAssistant:"),
        ("a ASSISTANT: b USER: c", "\n\nHuman: a\n\nAssistant: b\n\nHuman: c\n\nAssistant:"),
        (
            "\n\nUSER: a\n\n\nASSISTANT: b\nUSER: c\nASSISTANT:",
            "\n\nHuman: a\n\nAssistant: b\n\nHuman: c\n\nAssistant:",
        ),
        ("SYSTEM: s USER: a", "\n\nSystem: s\n\nHuman: a\n\nAssistant:"),
        # no marks: within a word, and without a colon
        ("USER: SUPERUSER: or USER", "\n\nHuman: SUPERUSER: or USER\n\nAssistant:"),
        # an answer that is empty is no turn
        ("USER: a ASSISTANT: USER: c", "\n\nHuman: a\n\nHuman: c\n\nAssistant:"),
    ],
)
def test_turns_bring_a_conversation_into_one_form(text: str, prompt: str) -> None:
    converted = convert({"prompt": {"from": "q", "turns": VICUNA}}, {"q": text})
    assert converted.records == [Record(prompt=prompt)]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("USER: a ASSISTANT: b", "prompt ends in an assistant turn"),
        ("USER: ASSISTANT:", "prompt is empty"),
        ("ASSISTANT:", "prompt is empty"),
    ],
)
def test_conversation_without_a_question_is_left_out(text: str, reason: str) -> None:
    columns = {"prompt": {"from": "q", "turns": VICUNA}}
    converted = convert(columns, {"q": "USER: a"}, {"q": text})
    assert len(converted.records) == 1
    assert converted.left_out == {reason: 1}


# -------------------------------------------------------------------------------------- comparisons


def picked(condition: str, **row: Any) -> str | None:
    rule = {"if": condition, "from": "yes", "else": "no"}
    full = {"text": "t", "yes": "y", "no": "n", "a": None, "b": None, "c": {"d": None}}
    converted = convert({"text": rule}, full | row, full | {"a": 1, "b": 1, "c": {"d": 1}})
    return converted.records[0].text if len(converted.records) == 2 else None


@pytest.mark.parametrize(
    ("condition", "row", "text"),
    [
        ("a == 1", {"a": 1}, "y"),
        ("a == 1", {"a": 0}, "n"),
        ("a==1", {"a": True}, "y"),
        ("a == 1", {"a": "1"}, "y"),  # CSV knows texts alone
        ("a != 1", {"a": 1.5}, "y"),
        ("a >= b", {"a": 0.5, "b": 0.5}, "y"),
        ("a > b", {"a": 0.5, "b": 0.5}, "n"),
        ("a <= c.d", {"a": -1.0, "c": {"d": 0}}, "y"),
        ("a < -0.5", {"a": -1}, "y"),
        ("a == 'model a'", {"a": "model a"}, "y"),
        ("a == 'model a'", {"a": "model b"}, "n"),
        ("a == 1", {"a": "tie"}, "n"),
        ("a == 1", {"a": None}, None),
        ("a >= b", {"a": 1, "b": None}, None),
        ("a >= b", {"a": float("nan"), "b": 1}, None),
        ("a >= b", {}, None),
    ],
)
def test_comparison_picks_the_column(condition: str, row: dict[str, Any], text: str | None) -> None:
    assert picked(condition, **row) == text


@pytest.mark.parametrize(
    ("condition", "value", "problem"),
    [
        ("a > 1", "tie", r"'tie' > 1\.0 orders what is no number"),
        ("a == 1", [1], r"'a' and what it is compared with must be values"),
    ],
)
def test_values_that_cannot_be_compared_are_refused(
    condition: str, value: Any, problem: str
) -> None:
    with pytest.raises(DataError, match=rf"^pets\.jsonl, row 1: {KEY}\.text: {problem}"):
        picked(condition, a=value)


# ------------------------------------------------------------------------------ parts of an example


PREFERENCE = {"prompt": "q", "chosen": "a", "rejected": "b"}


def test_absent_responses_leave_what_there_is() -> None:
    converted = convert(
        PREFERENCE,
        {"q": "Q", "a": "A", "b": "B"},
        {"q": "Q", "a": "A", "b": None},
        {"q": "Q", "a": None, "b": "B"},
        {"q": None, "a": "A", "b": "B"},
        {"q": "Q", "a": "A", "b": " A"},
    )
    assert converted.records == [
        Record(prompt="Q", chosen=" A", rejected=" B"),
        Record(prompt="Q", chosen=" A"),
        Record(prompt="Q"),
    ]
    assert converted.left_out == {"prompt is null": 1, "chosen equals rejected": 1}
    assert converted.layout == "columns"


def test_prompt_with_one_response_and_prompt_alone() -> None:
    row = {"q": "Q", "a": "A"}
    assert convert({"prompt": "q", "chosen": "a"}, row).records == [Record("Q", " A")]
    assert convert({"prompt": "q"}, row).records == [Record("Q")]


def test_ranking_from_another_column() -> None:
    columns = {"prompt": {"from": "q", "turn": "human"}, "responses": "answers"}
    prompt = "\n\nHuman: Q\n\nAssistant:"
    converted = convert(columns, {"q": "Q", "answers": ["A", "B"]}, {"q": "Q", "answers": []})
    assert converted.records == [Record(prompt, " A", " B")]
    assert converted.left_out == {"responses is empty, or has an empty text": 1}
    with pytest.raises(DataError, match=r"row 1: .*responses: 'n' is of type int; it must be a li"):
        convert(columns | {"responses": "n"}, {"q": "Q", "n": 5})


# ---------------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({}, r"makes nothing: it must make one of these and no others: prompt; chosen, prompt;"),
        ({"chosen": "a"}, r"makes chosen: it must make one of"),
        ({"prompt": "a", "rejected": "b"}, r"makes prompt, rejected: it must make one of"),
        ({"promt": "a"}, r"makes promt: it must make one of"),
    ],
)
def test_columns_that_make_no_example_are_refused(columns: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=rf"^data\.sets\.pets\.columns {message}"):
        convert(columns)


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (5, r"=5: it must be the path of a column, or a mapping"),
        (None, r"=None: it must be the path of a column"),
        ("a b", r"=a b: it must be the path of a column, such as prompt"),
        ("a[x]", r"=a\[x\]: it must be the path"),
        ("a..b", r"=a\.\.b: it must be the path"),
        ("", r"=: it must be the path"),
        ({"form": "a"}, r"\.form: no such step; choose among from, if, else, after, remove, turn"),
        ({"after": "x"}, r"=\{'after': 'x'\}: it needs 'from', and 'if' and 'else' together"),
        ({"from": "a", "if": "b == 1"}, r"=.*: it needs 'from', and 'if' and 'else' together"),
        ({"from": "a", "else": "b"}, r"=.*: it needs 'from', and 'if' and 'else' together"),
        ({"from": "a", "after": ""}, r"\.after=: it must be text"),
        ({"from": 5}, r"\.from=5: it must be text"),
        ({"from": "a", "remove": "("}, r"\.remove=\(: not a regular expression \("),
        ({"from": "a", "if": "b", "else": "c"}, r"\.if=b: it must compare a column with a number"),
        ({"from": "a", "if": "b === 1", "else": "c"}, r"\.if=b === 1: it must compare"),
        ({"from": "a", "if": "b[x] == 1", "else": "c"}, r"\.if=b\[x\]: it must be the path"),
        ({"from": "a", "if": "b == 'x", "else": "c"}, r"\.if='x: it must be the path"),
        ({"from": "a", "if": "b == 1", "else": "["}, r"\.else=\[: it must be the path"),
        ({"from": "a", "turn": "robot"}, r"\.turn=robot: it must be human"),
        ({"from": "a", "turns": "Human"}, r"\.turns=Human: it must map marks of the text to Sys"),
        ({"from": "a", "turns": {}}, r"\.turns=\{\}: it must map marks"),
        ({"from": "a", "turns": {"USER": "Robot"}}, r"\.turns=.*: it must map marks"),
        ({"from": "a", "turn": "human", "turns": VICUNA}, r" has turn and turns: one of the two"),
    ],
)
def test_wrong_rule_is_refused_by_its_key(rule: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=rf"^data\.sets\.pets\.columns\.prompt{message}"):
        convert({"prompt": rule})


def test_responses_are_no_conversations() -> None:
    columns = {"prompt": "q", "chosen": {"from": "a", "turn": "human"}}
    with pytest.raises(ConfigError, match=r"columns\.chosen has turn: .* for prompt only$"):
        convert(columns)
