"""Convert rows with known column layouts to ``Record``.

``LAYOUTS`` lists the supported layouts, named like TRL's dataset types. A column holds text, used
unchanged, or messages (lists of ``{"role": ..., "content": ...}``), rendered as turns:

    "\\n\\nSystem: ..."  "\\n\\nHuman: ..."  "\\n\\nAssistant: ..."

A rendered prompt ends in ``"\\n\\nAssistant:"`` and a response starts with a space. In text columns
one space is inserted between prompt and response if neither has whitespace there, since the parts
of DeepSpeed-Chat's local json are to be joined by spaces. With a ``prompt`` column ``rejected`` may
be null: the row is not a pair, but its prompt and answer are kept. A ranking, K responses with the
best first, becomes all of its K (K - 1) / 2 pairs (https://arxiv.org/abs/2203.02155, section 3.5).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from itertools import combinations
from typing import NamedTuple

from rlhf.data.records import SPEAKERS, Message, Record, Row, UnusableRowError

ASSISTANT_TURN = "\n\nAssistant:"
NO_COMMON_PROMPT = "chosen and rejected share no prompt up to their last answer"


class ColumnKind(StrEnum):
    """The kind of the values in a column."""

    text = "text"
    messages = "messages"
    texts = "texts"


def render_prompt(messages: Sequence[Message]) -> str:
    """Return the conversation as text, ready for the assistant's answer; skip empty turns."""
    turns = [f"\n\n{SPEAKERS[m.role]}: {m.content}" for m in messages if m.content]
    return "".join(turns) + ASSISTANT_TURN


# ------------------------------------------------------------------------- one converter per layout

Kinds = Mapping[str, ColumnKind]


def _read_text(row: Row, _: Kinds) -> list[Record]:
    return [Record(text=row.text("text"))]


def _read_conversation(row: Row, columns: Kinds) -> list[Record]:
    (column,) = columns
    *before, last = row.messages(column)
    chosen = _render_answer([last], column)
    return [Record(prompt=render_checked_prompt(before), chosen=chosen)]


def _read_prompt_only(row: Row, columns: Kinds) -> list[Record]:
    return [Record(prompt=_prompt_text(row, columns))]


def _read_completion(row: Row, columns: Kinds) -> list[Record]:
    prompt = _prompt_text(row, columns)
    (column,) = columns.keys() - {"prompt"}
    return [Record(prompt=prompt, chosen=_response_text(row, column, columns, prompt=prompt))]


def _read_preference(row: Row, columns: Kinds) -> list[Record]:
    prompt = _prompt_text(row, columns)
    chosen = _response_text(row, "chosen", columns, prompt=prompt)
    if row.values.get("rejected") is None:
        return [Record(prompt=prompt, chosen=chosen)]
    return _make_pair(prompt, chosen, _response_text(row, "rejected", columns, prompt=prompt))


def _read_partial_preference(row: Row, columns: Kinds) -> list[Record]:
    """Return the parts of a preference that the row has: at least the prompt."""
    has_answer = row.values.get("chosen") is not None
    return _read_preference(row, columns) if has_answer else _read_prompt_only(row, columns)


def _read_ranking(row: Row, _: Kinds) -> list[Record]:
    prompt = row.text("prompt")
    responses = [_add_space(prompt, response) for response in row.texts("responses")]
    if len(set(responses)) < len(responses):
        raise UnusableRowError("responses has the same text twice")
    if len(responses) == 1:
        return [Record(prompt=prompt, chosen=responses[0])]
    return [record for pair in combinations(responses, 2) for record in _make_pair(prompt, *pair)]


def _read_text_pair(row: Row, _: Kinds) -> list[Record]:
    chosen, rejected = row.text("chosen"), row.text("rejected")
    before, turn, chosen_answer = chosen.rpartition(ASSISTANT_TURN)
    same, _turn, rejected_answer = rejected.rpartition(ASSISTANT_TURN)
    if not turn or before != same:
        raise UnusableRowError(NO_COMMON_PROMPT)
    prompt = before + turn
    parts = {"prompt": before, "chosen": chosen_answer, "rejected": rejected_answer}
    for name, part in parts.items():
        if not part.strip():
            raise UnusableRowError(f"{name} is empty")
    return _make_pair(
        prompt, _add_space(prompt, chosen_answer), _add_space(prompt, rejected_answer)
    )


def _read_message_pair(row: Row, columns: Kinds) -> list[Record]:
    *before, chosen = row.messages("chosen")
    *same, rejected = row.messages("rejected")
    if before != same:
        raise UnusableRowError(NO_COMMON_PROMPT)
    if not before and "prompt" in columns:
        return _read_preference(row, columns)
    if not before and "conversations" in columns:
        before = row.messages("conversations")
    return _make_pair(
        render_checked_prompt(before),
        _render_answer([chosen], "chosen"),
        _render_answer([rejected], "rejected"),
    )


def _prompt_text(row: Row, columns: Kinds) -> str:
    if columns["prompt"] is ColumnKind.text:
        return row.text("prompt")
    return render_checked_prompt(row.messages("prompt"))


def _response_text(row: Row, column: str, columns: Kinds, *, prompt: str) -> str:
    if columns[column] is ColumnKind.text:
        return _add_space(prompt, row.text(column))
    return _render_answer(row.messages(column), column)


def _add_space(prompt: str, response: str) -> str:
    return response if prompt[-1].isspace() or response[0].isspace() else f" {response}"


def render_checked_prompt(messages: Sequence[Message]) -> str:
    """Return the conversation as a prompt.

    Raises:
        UnusableRowError: if the conversation or its last turn is empty, or the assistant has the
            last turn.
    """
    if not messages or not messages[-1].content:
        raise UnusableRowError("prompt is empty")
    if messages[-1].role == "assistant":
        raise UnusableRowError("prompt ends in an assistant turn")
    return render_prompt(messages)


def _render_answer(messages: Sequence[Message], column: str) -> str:
    if [message.role for message in messages] != ["assistant"]:
        raise UnusableRowError(f"{column} does not end in one assistant turn")
    if not messages[0].content:
        raise UnusableRowError(f"{column} ends in an empty turn")
    return f" {messages[0].content}"


def _make_pair(prompt: str, chosen: str, rejected: str) -> list[Record]:
    if chosen == rejected:
        raise UnusableRowError("chosen equals rejected")
    return [Record(prompt=prompt, chosen=chosen, rejected=rejected)]


# --------------------------------------------------------------------------------------- the table


class Layout(NamedTuple):
    """A set of columns with their kinds, and the function that converts a row to records."""

    name: str
    columns: Kinds
    convert: Callable[[Row, Kinds], list[Record]]


T, M = ColumnKind.text, ColumnKind.messages
KINDS = {
    "": (T, T),
    ", messages": (M, M),
    ", text and messages": (T, M),
    ", messages and text": (M, T),
}
PAIR_OF_MESSAGES = {"chosen": M, "rejected": M}
# Specific layouts come first: the first set of columns that a dataset has determines its layout.
LAYOUTS = (
    Layout("preference", {"prompt": T, "chosen": T, "rejected": T}, _read_preference),
    Layout("preference, messages", {"prompt": M, "chosen": M, "rejected": M}, _read_preference),
    Layout(
        "preference, messages and texts",
        {"prompt": M, "chosen": T, "rejected": T},
        _read_preference,
    ),
    # UltraFeedback: the conversations contain the prompt, and a text column repeats it. Answers of
    # one message each follow the text.
    Layout("preference, text and messages", {"prompt": T} | PAIR_OF_MESSAGES, _read_message_pair),
    Layout("preference, ShareGPT", {"conversations": M} | PAIR_OF_MESSAGES, _read_message_pair),
    Layout("ranking", {"prompt": T, "responses": ColumnKind.texts}, _read_ranking),
    *(
        Layout(f"prompt-{answer}{kinds}", {"prompt": asked, answer: answered}, _read_completion)
        for answer in ("completion", "response")
        for kinds, (asked, answered) in KINDS.items()
    ),
    Layout("implicit-prompt preference", {"chosen": T, "rejected": T}, _read_text_pair),
    Layout("implicit-prompt preference, messages", PAIR_OF_MESSAGES, _read_message_pair),
    Layout("language modelling, messages", {"messages": M}, _read_conversation),
    Layout("language modelling, ShareGPT", {"conversations": M}, _read_conversation),
    Layout("prompt-only", {"prompt": T}, _read_prompt_only),
    Layout("prompt-only, messages", {"prompt": M}, _read_prompt_only),
    Layout("language modelling", {"text": T}, _read_text),
)
# Used by data.sets.NAME.columns, never detected from columns: chosen and rejected may be absent.
PARTIAL = Layout("columns", {"prompt": T, "chosen": T, "rejected": T}, _read_partial_preference)
KNOWN_COLUMNS = frozenset(column for layout in LAYOUTS for column in layout.columns)
