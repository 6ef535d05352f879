"""Expressions make the columns of a known layout; wrong ones are refused by their key."""

from typing import Any

import pytest

from rlhf.base.errors import ConfigError, DataError
from rlhf.data.column_rules import Converted, parse_columns
from rlhf.data.records import Record, Row

KEY = "data.sets.pets.columns"


def convert(columns: dict[str, str], *values: dict[str, Any]) -> Converted:
    rows = [Row("pets.jsonl", number, row) for number, row in enumerate(values, 1)]
    converted = parse_columns(columns, key=KEY).convert(rows, source="pets.jsonl")
    texts = [record._replace(messages=None, place=None) for record in converted.records]
    return converted._replace(records=texts)


# -------------------------------------------------------------------------------------------- paths


@pytest.mark.parametrize(
    "row",
    [
        {"a": None},
        {"a": {"b": []}},
        {"a": {"b": [{"c": None}]}},
        {"a": {"b": [{"c": " \n"}]}},
        {"a": {"b": [{}]}},
        {},
    ],
)
def test_part_is_absent_where_its_path_ends_early(row: dict[str, Any]) -> None:
    whole = {"a": {"b": [{"c": "x"}]}}
    converted = convert({"text": "a.b[0].c"}, whole, row)
    assert converted.records == [Record(text="x")]
    assert converted.left_out == {"text is null": 1}


@pytest.mark.parametrize(
    ("expression", "problem"),
    [
        *(
            (text, ".text reads 'b', which no row has; the columns are a, z.")
            for text in ("b", "pick(z > `0`, a, b)", "b.c | d", "max_by(b, &c)")
        ),
        *((path, f".text={path} is null in every row.") for path in ("a.c", "a.b[0].d", "a.b[7]")),
    ],
)
def test_expressions_that_read_nothing_are_refused(expression: str, problem: str) -> None:
    row = {"a": {"b": [{"c": "x"}]}, "z": 1}
    with pytest.raises(DataError) as refused:
        convert({"text": expression}, row, row)
    assert str(refused.value) == f"pets.jsonl: {KEY}{problem}"


# ---------------------------------------------------------------------------------------- functions


VICUNA = {"prompt": "conversation(q, 'USER', 'ASSISTANT')"}


@pytest.mark.parametrize(
    ("text", "prompt"),
    [
        ("USER: a ASSISTANT:", "\n\nHuman: a\n\nAssistant:"),
        (" a ", "\n\nHuman: a\n\nAssistant:"),
        ("a ASSISTANT: b USER: c", "\n\nHuman: a\n\nAssistant: b\n\nHuman: c\n\nAssistant:"),
        (
            "\n\nUSER: a\n\n\nASSISTANT: b\nUSER: c\nASSISTANT:",
            "\n\nHuman: a\n\nAssistant: b\n\nHuman: c\n\nAssistant:",
        ),
        # no marks: within a word, and without a colon
        ("USER: SUPERUSER: or USER", "\n\nHuman: SUPERUSER: or USER\n\nAssistant:"),
        # an answer that is empty is no turn
        ("USER: a ASSISTANT: USER: c", "\n\nHuman: a\n\nHuman: c\n\nAssistant:"),
        # rows without a question are counted
        ("USER: a ASSISTANT: b", "prompt ends in an assistant turn"),
        ("USER: ASSISTANT:", "prompt is empty"),
        (" ", "prompt is null"),
    ],
)
def test_conversation_gets_the_turns_of_its_marks(text: str, prompt: str) -> None:
    _, *found = (converted := convert(VICUNA, {"q": "USER: a"}, {"q": text})).records
    assert [record.prompt for record in found] + [*converted.left_out] == [prompt]


@pytest.mark.parametrize(
    ("condition", "row", "text"),
    [
        ("a == `1`", {"a": 0}, "n"),
        ("to_number(a) == `1`", {"a": "1"}, "y"),  # CSV knows texts alone
        ("a >= b", {"a": 0.5, "b": 0.5}, "y"),
        ("a <= c.d", {"a": -1.0, "c": {"d": 0}}, "y"),
        ("a == 'model a'", {"a": "model a"}, "y"),
        ("a == 'model a'", {"a": "model b"}, "n"),
        ("a > `1`", {"a": None}, None),
        ("a >= b", {"a": 1, "b": None}, None),
    ],
)
def test_pick_follows_its_condition(condition: str, row: dict[str, Any], text: str | None) -> None:
    expression = f"pick({condition}, yes, no)"
    full = {"text": "t", "yes": "y", "no": "n", "a": None, "b": None, "c": {"d": None}}
    converted = convert({"text": expression}, full | row, full | {"a": 1, "b": 1, "c": {"d": 1}})
    assert (converted.records[0].text if len(converted.records) == 2 else None) == text


@pytest.mark.parametrize(
    ("expression", "problem"),
    [
        ("after(a, ':')", r"In function after\(\), invalid type for value: 5"),
        ("pick(a, a, a)", r"In function pick\(\), invalid type for value: 5, expected one of"),
        ("remove('x', '(')", r"error: missing \), unterminated subpattern at position 0"),
        (
            "pick(a >= 'x', a, a)",
            r"TypeError: '>=' not supported between instances of 'int' and 'str'",
        ),
        ("after(a)", r"Expected 2 arguments for function after\(\), received 1"),
    ],
)
def test_row_that_an_expression_does_not_fit_is_refused(expression: str, problem: str) -> None:
    with pytest.raises(DataError, match=rf"^pets\.jsonl, row 1: {KEY}\.text: {problem}"):
        convert({"text": expression}, {"a": 5})


# ------------------------------------------------------------------------------ parts of an example


def test_messages_of_pairs_and_of_lines() -> None:
    columns = {"messages": "turns([history, [[lines(q, more), a]]][])"}
    history = [["H", "I"], ["", None]]
    converted = convert(columns, {"q": "Q", "more": "M", "a": "A", "history": history})
    prompt = "\n\nHuman: H\n\nAssistant: I\n\nHuman: Q\nM\n\nAssistant:"
    assert [each._replace(turns=()) for each in converted.records] == [Record(prompt, " A")]
    (asking,) = convert(columns, {"q": "", "more": "M", "a": None, "history": None}).records
    assert asking == Record("\n\nHuman: M\n\nAssistant:")


# ---------------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ("", r"\(none\); must have exactly one of these sets: prompt; chosen, prom"),
        ("chosen", r"chosen; must have"),
        ("prompt rejected", r"prompt, rejected; must have"),
    ],
)
def test_columns_that_make_no_example_are_refused(columns: str, message: str) -> None:
    with pytest.raises(ConfigError, match=rf"^data\.sets\.pets\.columns has the columns {message}"):
        convert(dict.fromkeys(columns.split(), "a"))


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        ("a b", r"=a b: not a JMESPath expression \(.*\)\. Examples: question, answers"),
        ("回答", r"=回答: not a .* Put names .* in double quotes"),
        ("", r"=: not a JMESPath expression"),
        ("(" * 900, r"=\(+: not a JMESPath expression \(RecursionError"),
        (".".join(["a"] * 4000), r": has 7,999 characters; the limit is 1,000"),
        ("a[?b > `" + "9" * 5000 + "`]", r": has 5,010 characters; the limit is 1,000"),
        ("humans(a)", r"=humans\(a\): no function humans; choose one of abs, after, avg, .* pick"),
    ],
)
def test_wrong_expression_is_refused_by_its_key(expression: str, message: str) -> None:
    with pytest.raises(ConfigError, match=rf"^data\.sets\.pets\.columns\.prompt{message}"):
        convert({"prompt": expression})
