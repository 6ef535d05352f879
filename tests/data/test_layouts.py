"""Layouts become records; what cannot be used is counted; what is wrong is refused."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from rlhf.base.errors import DataError
from rlhf.data.detect import Converted, detect_layout, to_records
from rlhf.data.layouts import LAYOUTS, ColumnKind
from rlhf.data.records import Message, Record, Row, render_prompt

PROMPT = "\n\nHuman: Hi\n\nAssistant:"
ASK = [{"role": "user", "content": "Hi"}]
YES = [{"role": "assistant", "content": "Yes"}]
NO = [{"role": "assistant", "content": "No"}]
HUMAN = [{"from": "human", "value": "Hi"}]  # ShareGPT's messages
GPT = [{"from": "gpt", "value": "Yes"}]
OTHER_ROLES = [{"role": "human", "content": "Hi"}, {"role": "gpt", "content": "Yes"}]
PAIR = Record(prompt=PROMPT, chosen=" Yes", rejected=" No")
ANSWERED = Record(prompt=PROMPT, chosen=" Yes")


def convert(*values: dict[str, Any]) -> Converted:
    rows = [Row("data.jsonl", number, row) for number, row in enumerate(values, 1)]
    converted = to_records(rows, source="data.jsonl")
    as_text = [each._replace(messages=None, place=None) for each in converted.records]
    return converted._replace(records=as_text)


EXAMPLES: list[tuple[str, dict[str, Any], Record]] = [
    ("preference", {"prompt": PROMPT, "chosen": " Yes", "rejected": " No"}, PAIR),
    ("preference, messages", {"prompt": ASK, "chosen": YES, "rejected": NO}, PAIR),
    ("preference, messages and texts", {"prompt": ASK, "chosen": "Yes", "rejected": "No"}, PAIR),
    (
        "preference, text and messages",
        {"prompt": "Hi", "chosen": ASK + YES, "rejected": ASK + NO},
        PAIR,
    ),
    ("preference, text and messages", {"prompt": PROMPT, "chosen": YES, "rejected": NO}, PAIR),
    (
        "preference, ShareGPT",
        {"conversations": HUMAN, "chosen": GPT[0], "rejected": {"from": "gpt", "value": "No"}},
        PAIR,
    ),
    ("ranking", {"prompt": PROMPT, "responses": ["Yes", " No"]}, PAIR),
    ("prompt-completion", {"prompt": PROMPT, "completion": " Yes"}, ANSWERED),
    ("prompt-completion, messages", {"prompt": ASK, "completion": YES}, ANSWERED),
    ("prompt-completion, text and messages", {"prompt": PROMPT, "completion": YES}, ANSWERED),
    ("prompt-completion, messages and text", {"prompt": ASK, "completion": "Yes"}, ANSWERED),
    ("prompt-response, text and messages", {"prompt": PROMPT, "response": YES}, ANSWERED),
    ("prompt-response, messages and text", {"prompt": ASK, "response": "Yes"}, ANSWERED),
    ("prompt-response", {"prompt": PROMPT, "response": " Yes"}, ANSWERED),
    ("prompt-response, messages", {"prompt": ASK, "response": YES}, ANSWERED),
    ("implicit-prompt preference", {"chosen": f"{PROMPT} Yes", "rejected": f"{PROMPT} No"}, PAIR),
    ("implicit-prompt preference, messages", {"chosen": ASK + YES, "rejected": ASK + NO}, PAIR),
    ("language modelling, messages", {"messages": ASK + YES}, ANSWERED),
    ("language modelling, messages", {"messages": OTHER_ROLES}, ANSWERED),
    ("language modelling, ShareGPT", {"conversations": HUMAN + GPT}, ANSWERED),
    ("prompt-only", {"prompt": PROMPT}, Record(prompt=PROMPT)),
    ("prompt-only, messages", {"prompt": ASK}, Record(prompt=PROMPT)),
    ("language modelling", {"text": "Once upon a time"}, Record(text="Once upon a time")),
]


def test_every_layout_becomes_records() -> None:
    for name, row, record in EXAMPLES:
        assert convert(row) == Converted([record], name, Counter()), name
        more = {"id": 7, **row, "score": None}
        assert convert(more) == Converted([record], name, Counter(), unread=("id",)), name
    assert {name for name, _, _ in EXAMPLES} == {layout.name for layout in LAYOUTS}


@pytest.mark.parametrize(
    ("columns", "name"),
    [
        ("prompt chosen rejected completion text", "preference"),
        ("prompt completion chosen", "prompt-completion"),
        ("prompt completion responses", "ranking"),
        ("prompt response chosen rejected", "preference"),
        ("chosen rejected text", "implicit-prompt preference"),
        ("prompt text", "prompt-only"),
        ("prompt chosen", "prompt-only"),
    ],
)
def test_the_most_specific_layout_wins(columns: str, name: str) -> None:
    values = {column: ["x"] if column == "responses" else "x" for column in columns.split()}
    row = Row("data.jsonl", 1, values)
    assert detect_layout([row], source="data.jsonl").name == name


def test_messages_win_over_the_prompt_beside_them() -> None:
    # UltraChat: the conversation holds the prompt, and more
    assert convert({"prompt": "Hi", "messages": ASK + YES}).records == [ANSWERED]


def test_conversations_beside_whole_conversations_are_not_the_prompt() -> None:
    row = {"conversations": ASK, "chosen": ASK + YES, "rejected": ASK + NO}
    assert convert(row).records == [PAIR]


def test_columns_and_kinds_are_those_of_all_rows() -> None:
    converted = convert(
        {"prompt": None, "chosen": YES}, {"prompt": ASK, "chosen": YES, "rejected": NO}
    )
    assert converted == Converted([PAIR], "preference, messages", Counter({"prompt is null": 1}))


# -------------------------------------------------------------------------------------- white space


@pytest.mark.parametrize(
    ("prompt", "response", "joined"),
    [
        ("Human: a Assistant:", "b", "Human: a Assistant: b"),  # DeepSpeed-Chat's local json
        ("Human: a Assistant:", " b", "Human: a Assistant: b"),
        ("Human: a Assistant: ", "b", "Human: a Assistant: b"),
        ("Q: a\n", "b", "Q: a\nb"),
    ],
)
def test_one_space_where_there_is_none(prompt: str, response: str, joined: str) -> None:
    (pair,) = convert({"prompt": prompt, "chosen": response, "rejected": f"{response}!"}).records
    (answered,) = convert({"prompt": prompt, "completion": response}).records
    assert pair.prompt == answered.prompt == prompt
    assert (pair.chosen, pair.rejected) == (answered.chosen, f"{answered.chosen}!")
    assert f"{prompt}{answered.chosen}" == joined


@pytest.mark.parametrize("answer", [YES, " Yes"])
def test_null_rejected_keeps_prompt_and_answer(answer: Any) -> None:
    prompt = ASK if isinstance(answer, list) else PROMPT
    converted = convert({"prompt": prompt, "chosen": answer, "rejected": None})
    assert converted.records == [ANSWERED]
    assert not converted.left_out


def test_implicit_prompt_ends_at_the_last_assistant_turn() -> None:
    history = "\n\nHuman: a\n\nAssistant: b\n\nHuman: c\n\nAssistant:"
    (record,) = convert({"chosen": f"{history} d", "rejected": f"{history}e\n"}).records
    assert record == Record(prompt=history, chosen=" d", rejected=" e\n")


def test_conversation_is_rendered_as_turns() -> None:
    messages = [
        Message("system", "Be kind."),
        Message("user", "Hi"),
        Message("assistant", "Yes?"),
        Message("user", "Bye"),
    ]
    turns = "\n\nSystem: Be kind.\n\nHuman: Hi\n\nAssistant: Yes?\n\nHuman: Bye\n\nAssistant:"
    assert render_prompt(messages) == turns
    rows = [{"role": message.role, "content": message.content} for message in messages]
    assert convert({"prompt": rows}).records == [Record(prompt=turns)]
    (record,) = convert({"messages": [*rows, *YES]}).records
    assert record == Record(
        prompt=turns, chosen=" Yes", turns=(*messages, Message("assistant", "Yes"))
    )


def test_white_space_of_messages_is_kept_but_blank_turns_are_not_shown() -> None:
    messages = [
        {"role": "system", "content": " "},
        {"role": "user", "content": " Hi\n"},
        {"role": "assistant", "content": "    Yes "},
    ]
    prompt = "\n\nHuman:  Hi\n\n\nAssistant:"
    assert convert({"messages": messages}).records == [Record(prompt=prompt, chosen="     Yes ")]


# ---------------------------------------------------------------------------------------- rankings


def test_ranking_becomes_all_pairs_of_better_and_worse() -> None:
    converted = convert({"prompt": "Q:", "responses": ["a", "b", " c", "d"]})
    pairs = [(r.prompt, r.chosen, r.rejected) for r in converted.records]
    assert pairs == [
        ("Q:", " a", " b"),
        ("Q:", " a", " c"),
        ("Q:", " a", " d"),
        ("Q:", " b", " c"),
        ("Q:", " b", " d"),
        ("Q:", " c", " d"),
    ]


def test_ranking_of_one_is_an_answer() -> None:
    converted = convert(
        {"prompt": PROMPT, "responses": []}, {"prompt": PROMPT, "responses": ["Yes"]}
    )
    assert converted.records == [ANSWERED]
    assert list(converted.left_out.values()) == [1]


@pytest.mark.parametrize(
    ("responses", "message"),
    [
        ("Yes", r"column 'responses' .* type str; must be a list of texts or null\."),
        (["Yes", 5], r"responses\[1\] is of type int; must be text\."),
    ],
)
def test_malformed_ranking_is_refused(responses: Any, message: str) -> None:
    with pytest.raises(DataError, match=rf"^data\.jsonl, row 2: {message}"):
        convert({"prompt": "Q", "responses": ["a", "b"]}, {"prompt": "Q", "responses": responses})


# --------------------------------------------------------------------------- rows that are left out


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"prompt": None, "chosen": "a", "rejected": "b"}, "prompt is null"),
        ({"prompt": " ", "chosen": "a", "rejected": "b"}, "prompt is empty"),
        ({"prompt": PROMPT, "chosen": "a", "rejected": "\n"}, "rejected is empty"),
        ({"prompt": PROMPT, "chosen": "a", "rejected": " a"}, "chosen equals rejected"),
        ({"prompt": PROMPT, "responses": []}, "responses is empty"),
        ({"prompt": PROMPT, "responses": ["Yes", " "]}, "responses is empty, or has an empty text"),
        ({"prompt": PROMPT, "responses": ["a", "b", " a"]}, "responses has the same text twice"),
        ({"prompt": PROMPT, "completion": None}, "completion is null"),
        ({"text": "\n"}, "text is empty"),
        ({"chosen": f"{PROMPT} a", "rejected": f"{PROMPT} a"}, "chosen equals rejected"),
        ({"chosen": PROMPT, "rejected": f"{PROMPT} a"}, "chosen is empty"),
        ({"chosen": "\n\nAssistant: a", "rejected": "\n\nAssistant: b"}, "prompt is empty"),
        ({"chosen": f"x{PROMPT} a", "rejected": f"y{PROMPT} b"}, "share no prompt"),
        # the answers hold turns of their own: learning them would teach to speak for the human
        ({"chosen": f"{PROMPT} a{PROMPT} b", "rejected": f"{PROMPT} a"}, "share no prompt"),
        ({"chosen": f"{PROMPT} a{PROMPT} b", "rejected": f"{PROMPT} c{PROMPT} d"}, "share no"),
        ({"prompt": [{"role": "user", "content": " "}]}, "prompt is empty"),
        ({"prompt": ASK + YES}, "prompt ends in an assistant turn"),
        ({"chosen": ASK + YES, "rejected": []}, "rejected is empty"),
        ({"messages": ASK}, "messages does not end in one assistant turn"),
        ({"messages": YES}, "prompt is empty"),
        (
            {"messages": [*ASK, {"role": "assistant", "content": ""}]},
            "messages ends in an empty turn",
        ),
        ({"prompt": ASK, "completion": YES + ASK + YES}, "completion does not end in one"),
        ({"prompt": ASK, "chosen": YES, "rejected": YES}, "chosen equals rejected"),
        ({"chosen": ASK + YES, "rejected": [*ASK, *ASK, *NO]}, "share no prompt"),
        ({"chosen": ASK + YES, "rejected": ASK + YES}, "chosen equals rejected"),
        ({"chosen": YES, "rejected": NO}, "prompt is empty"),
    ],
)
def test_unusable_row_is_counted(row: dict[str, Any], reason: str) -> None:
    # a usable row beside it, which also tells the kind of a column that is null
    usable = next(values for _, values, _ in EXAMPLES if fits(values, row))
    converted = convert(usable, row, usable, row)
    assert len(converted.records) == 2
    assert list(converted.left_out.values()) == [2]
    assert reason in next(iter(converted.left_out))


def fits(example: dict[str, Any], row: dict[str, Any]) -> bool:
    kinds = {column: type(value) for column, value in row.items() if value is not None}
    return example.keys() == row.keys() and all(
        type(example[column]) is kind for column, kind in kinds.items()
    )


# -------------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": 5}, r"column 'prompt' holds a value of type int; must be text or null\."),
        (
            {"prompt": {"role": "user"}},
            r"column 'prompt' .* type dict; .* data\.sets\.NAME\.columns can select a part of it",
        ),
    ],
)
def test_text_of_the_wrong_type_is_refused(row: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=rf"^data\.jsonl, row 2: {message}"):
        convert({"prompt": "Hi"}, row)


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ("Hi", r"column 'messages' .* type str; must be a list of messages or null\."),
        ([*ASK, {"from": "gpt"}], r"messages\[1\] has the keys \['from'\]; a message is an object"),
        (
            [{"role": "critic", "content": "x"}],
            r"has the role 'critic'; must be one of system, user, assistant, tool, ",
        ),
        ([{"from": ["gpt"], "value": "x"}], r"has the role .*gpt.*; must be one of"),
        ([{"role": ["user"], "content": "x"}], r"has the role \['user'\]; must be one of"),
        ([{"role": "user", "content": None}], r"has content of type NoneType; must be text\."),
    ],
)
def test_malformed_messages_are_refused(messages: Any, message: str) -> None:
    with pytest.raises(DataError, match=rf"^data\.jsonl, row 2: .*{message}"):
        convert({"messages": ASK + YES}, {"messages": messages}, {"messages": messages})


def test_a_row_with_an_odd_message_is_counted_with_its_place() -> None:
    odd = {"messages": [*ASK, {"role": "critic", "content": "x"}]}
    converted = convert({"messages": ASK + YES}, odd, {"messages": ASK + YES}, odd)
    assert len(converted.records) == 2
    ((reason, count),) = converted.left_out.items()
    assert count == 2
    assert reason.startswith("messages[] has the role 'critic'")
    assert reason.endswith("(first: data.jsonl, row 2)")


def test_unknown_columns_are_refused_with_the_known_layouts() -> None:
    with pytest.raises(DataError) as refused:
        convert({"question": "Hi", "answer": "Yes"})
    first, *others, last = str(refused.value).splitlines()
    assert first == ("data.jsonl: no known layout has the columns question, answer. Known layouts:")
    assert others[0] == "  preference: prompt (text), chosen (text), rejected (text)"
    assert len(others) == len(LAYOUTS)
    assert last.startswith("For other columns, say with data.sets.NAME.columns")


def test_column_of_nulls_fits_any_kind() -> None:
    rows = [Row("data.jsonl", 1, {"prompt": ASK, "chosen": YES, "rejected": None})]
    layout = detect_layout(rows, source="data.jsonl")
    assert layout.columns == dict.fromkeys(("prompt", "chosen", "rejected"), ColumnKind.messages)
