"""Convert rows with known column layouts to ``Record``.

``columns.yaml`` lists the supported layouts, named like TRL's dataset types. A column holds text,
used unchanged, or messages (lists of ``{"role": ..., "content": ...}``). A record keeps the
messages of its prompt, which chat templates render, and also stores them as text with turns:

    "\\n\\nSystem: ..."  "\\n\\nHuman: ..."  "\\n\\nAssistant: ..."

A rendered prompt ends in ``"\\n\\nAssistant:"`` and a response starts with a space. In text columns
one space is inserted between prompt and response if neither has whitespace there, as the json files
of DeepSpeed-Chat require. The text in a column ``system`` is the first turn of the prompt. If there
is a ``prompt`` column, ``rejected`` may be null: the row is not a pair, but its prompt and answer
are kept. A ranking (K responses, the best first) becomes all of its K (K - 1) / 2 pairs
(https://arxiv.org/abs/2203.02155, section 3.5).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from itertools import combinations
from typing import Any, NamedTuple

from rlhf.base.packaged_yaml import read_yaml_beside
from rlhf.data.records import (
    ASSISTANT_TURN,
    SPEAKERS,
    Message,
    Record,
    Row,
    UnusableRowError,
    find_learned_turns,
    render_prompt,
)

NO_COMMON_PROMPT = "chosen and rejected share no prompt up to their last answer"
PROMPT_ELSEWHERE = (
    "; if the column {0} is the prompt, use data.sets.NAME.columns="
    "{{prompt: 'human({0})', chosen: chosen, rejected: rejected}}"
)
# The columns of each layout, and names of columns with a special meaning.
NAMES: Mapping[str, Any] = read_yaml_beside(__file__, "columns.yaml")
SYSTEM = "system"  # name of the column with a system turn, the first turn of a prompt
TOOLS = "tools"  # name of the column with the tools that a conversation may call
ROLES = {speaker: role for role, speaker in SPEAKERS.items()}
# The last turn may follow a space instead of a blank line, as in DeepSpeed-Chat's own files.
TURN = re.compile(rf"(?:\A\s*|\n\n|\s(?=Assistant:\s*\Z))({'|'.join(ROLES)}):")


class ColumnKind(StrEnum):
    """The kind of the values in a column."""

    text = "text"
    messages = "messages"
    texts = "texts"
    any = "text or messages"


def split_turns(prompt: str) -> tuple[list[Message], str]:
    """Return the messages of ``prompt``, and the text of an answer begun at its end ("" if none).

    Empty turns are skipped. Text before the first turn is a system message, or a user message if
    there is no user turn.
    """
    before, *parts = TURN.split(prompt)
    spoken = [(ROLES[name], text) for name, text in zip(parts[::2], parts[1::2], strict=True)]
    has_user = any(role == "user" for role, _ in spoken)
    spoken.insert(0, ("system" if has_user else "user", before))
    begun = spoken.pop()[1].lstrip() if spoken[-1][0] == "assistant" else ""
    return [Message(role, text.strip()) for role, text in spoken if text.strip()], begun


# ------------------------------------------------------- functions that convert a row of one layout

Kinds = Mapping[str, ColumnKind]
Convert = Callable[[Row, Kinds], list[Record]]


def _read_conversation(row: Row, columns: Kinds) -> list[Record]:
    """Return a record of the last answer to learn, with all turns if they have more to learn."""
    (column,) = columns
    messages = row.messages(column)
    learned = find_learned_turns(messages)
    if not learned:
        _require_answer(messages[-1:], column)
        return [_record_of_messages(messages[:-1], row)]  # raises: its prompt is no prompt
    *before, last = messages[: learned[-1] + 1]
    asked = _record_of_messages(before, row)
    turns = (*(asked.messages or ()), *messages[learned[-1] :])
    has_more = last.shown or sum(each.role == "assistant" for each in turns) > 1
    return [asked._replace(chosen=f" {last.text}", turns=turns if has_more else ())]


def _read_completion(row: Row, columns: Kinds) -> list[Record]:
    asked = _read_prompt(row, columns)
    (column,) = columns.keys() - {"prompt"}
    if asked.messages is not None and not _is_text(row, column, columns):
        (answer, *_) = messages = row.messages(column)
        if len(messages) == 1 and answer.is_learned and answer.shown:
            said = tuple(each.without_weight() for each in asked.messages)
            return [asked._replace(chosen=f" {answer.text}", turns=(*said, answer))]
    return [asked._replace(chosen=_read_response(row, column, columns, asked))]


def _read_preference(row: Row, columns: Kinds) -> list[Record]:
    asked = _read_prompt(row, columns)
    chosen = _read_response(row, "chosen", columns, asked)
    if row.values.get("rejected") is None:
        return [asked._replace(chosen=chosen)]
    return _make_pair(asked, chosen, _read_response(row, "rejected", columns, asked))


def _read_partial_preference(row: Row, columns: Kinds) -> list[Record]:
    """Return a record with the prompt, and with the chosen and rejected response if present."""
    has_answer = row.values.get("chosen") is not None
    return _read_preference(row, columns) if has_answer else [_read_prompt(row, columns)]


def _read_ranking(row: Row, columns: Kinds) -> list[Record]:
    asked = _read_prompt(row, columns)
    responses = [_add_space(asked, response) for response in row.texts("responses")]
    if len(set(responses)) < len(responses):
        raise UnusableRowError("responses has the same text twice")
    if len(responses) == 1:
        return [asked._replace(chosen=responses[0])]
    return [record for pair in combinations(responses, 2) for record in _make_pair(asked, *pair)]


def _read_text_pair(row: Row, _: Kinds) -> list[Record]:
    chosen, rejected = row.text("chosen"), row.text("rejected")
    before, turn, chosen_answer = chosen.rpartition(ASSISTANT_TURN)
    same, _turn, rejected_answer = rejected.rpartition(ASSISTANT_TURN)
    if not turn or before != same:
        asking = next((name for name in NAMES["asking"] if row.values.get(name)), None)
        hint = PROMPT_ELSEWHERE.format(asking) if asking else ""
        raise UnusableRowError(NO_COMMON_PROMPT + hint)
    prompt = before + turn
    parts = {"prompt": before, "chosen": chosen_answer, "rejected": rejected_answer}
    for name, part in parts.items():
        if not part.strip():
            raise UnusableRowError(f"{name} is empty")
    asked = _record_of_text_prompt(prompt, row)
    return _make_pair(asked, _add_space(asked, chosen_answer), _add_space(asked, rejected_answer))


def _read_message_pair(row: Row, columns: Kinds) -> list[Record]:
    *before, chosen = row.messages("chosen")
    *same, rejected = row.messages("rejected")
    if before != same:
        raise UnusableRowError(NO_COMMON_PROMPT)
    if not before and "prompt" in columns:
        return _read_preference(row, columns)
    if not before and "conversations" in columns:
        before = row.messages("conversations")
    asked = _record_of_messages(before, row)
    answers = (
        f" {_require_answer([last], c)}" for c, last in (("chosen", chosen), ("rejected", rejected))
    )
    return _make_pair(asked, *answers)


def _read_prompt(row: Row, columns: Kinds) -> Record:
    if _is_text(row, "prompt", columns):
        return _record_of_text_prompt(row.text("prompt"), row)
    return _record_of_messages(row.messages("prompt"), row)


def _read_response(row: Row, column: str, columns: Kinds, asked: Record) -> str:
    if _is_text(row, column, columns):
        return _add_space(asked, row.text(column))
    answer = _require_answer(row.messages(column), column)
    return _add_space(asked, answer) if asked.messages is None else f" {answer}"


def _is_text(row: Row, column: str, columns: Kinds) -> bool:
    if columns[column] is ColumnKind.any:
        return not isinstance(row.values.get(column), list | dict)
    return columns[column] is ColumnKind.text


def _add_space(asked: Record, response: str) -> str:
    """Return the response, with a space before it if it needs one to be joined to the prompt.

    After messages, it needs one unless it begins with exactly one space.
    """
    if asked.messages is not None:
        return response if re.match(r" \S", response) else f" {response}"
    ends_in_space = asked.prompt is not None and asked.prompt[-1].isspace()
    return response if ends_in_space or response[0].isspace() else f" {response}"


def _record_of_text_prompt(prompt: str, row: Row) -> Record:
    """Return a record of a text prompt, which is split into messages if there is a system turn."""
    if not _has_system_turn(row):
        return Record(prompt=prompt)
    messages, begun = split_turns(prompt)
    if begun:
        raise UnusableRowError(f"prompt has the start of an answer, and there is a {SYSTEM} column")
    return _record_of_messages(messages, row)


def _record_of_messages(messages: Sequence[Message], row: Row) -> Record:
    """Return a record whose prompt is ``messages``, after the row's system turn if it has one."""
    if not messages or not messages[-1].text.strip():
        raise UnusableRowError("prompt is empty")
    if messages[-1].role == "assistant":
        raise UnusableRowError("prompt ends in an assistant turn")
    if _has_system_turn(row):
        if any(message.role == SYSTEM for message in messages):
            raise UnusableRowError(f"has a system turn and a {SYSTEM} column")
        messages = [Message(SYSTEM, row.text(SYSTEM)), *messages]
    return Record(prompt=render_prompt(messages), messages=tuple(messages))


def _has_system_turn(row: Row) -> bool:
    value = row.values.get(SYSTEM)
    return bool(value.strip() if isinstance(value, str) else value)


def _require_answer(messages: Sequence[Message], column: str) -> str:
    if [message.role for message in messages] != ["assistant"]:
        asks = column in ("messages", "conversations")
        hint = ": name the column 'prompt' if it only asks" if asks else ""
        raise UnusableRowError(f"{column} does not end in one assistant turn{hint}")
    (answer,) = messages
    if answer.shown:
        raise UnusableRowError(f"{column} has {', '.join(answer.shown)} in an answer of a pair")
    if not answer.content.strip():
        raise UnusableRowError(f"{column} ends in an empty turn")
    if not answer.is_learned:
        raise UnusableRowError("no answer may be learned (weight=0 or train=false)")
    return answer.content


def _make_pair(asked: Record, chosen: str, rejected: str) -> list[Record]:
    if chosen == rejected:
        raise UnusableRowError("chosen equals rejected")
    return [asked._replace(chosen=chosen, rejected=rejected)]


# ---------------------------------------------------------------------------- the table of layouts


class Layout(NamedTuple):
    """A set of columns with their kinds, and the function that converts a row to records."""

    name: str
    columns: Kinds
    convert: Convert


CONVERTERS: Mapping[str, Convert] = {
    "preference": _read_preference,
    "pair of messages": _read_message_pair,
    "pair of texts": _read_text_pair,
    "ranking": _read_ranking,
    "completion": _read_completion,
    "conversation": _read_conversation,
    "prompt only": lambda row, columns: [_read_prompt(row, columns)],
    "text": lambda row, _: [Record(text=row.text("text"))],
}
LAYOUTS = [
    Layout(name, {column: ColumnKind(kind) for column, kind in columns.items()}, CONVERTERS[read])
    for read, layouts in NAMES["layouts"]
    for name, columns in layouts.items()
]
# The layout PARTIAL is used with data.sets.NAME.columns only. It cannot be detected from a file's
# columns, since chosen and rejected may be absent.
EITHER = dict.fromkeys(("prompt", "chosen", "rejected"), ColumnKind.any)
PARTIAL = Layout("columns", EITHER, _read_partial_preference)
RANKING = Layout(
    "ranking", {"prompt": ColumnKind.any, "responses": ColumnKind.texts}, _read_ranking
)
KNOWN_COLUMNS = frozenset(column for layout in LAYOUTS for column in layout.columns)
