"""Convert the values of a layout to records.

A layout computes these values, its targets, of each row (``columns.yaml``, ``column_rules.py``):

    text                      a text without turns
    messages                  a conversation; its last answer is the response
    prompt, chosen, rejected  a prompt and its responses; without a prompt, each response is a whole
                              conversation, and the prompt is what both have in common
    prompt, responses         several responses, the best first, or with ``scores`` (higher is
                              better) or ``ranks`` (lower is better)
    grade, rank               a mark (True: good, False: bad) or a score of the only response
    system, tools             the first turn of the prompt, and the tools of a conversation
    threads                   only marks a layout of trees: ``expand_threads`` makes their targets

A prompt or response is text, used unchanged, or messages (lists of ``{"role": ..., "content":
...}``). A record keeps the messages of its prompt, which chat templates render, and also stores
them as text with turns:

    "\\n\\nSystem: ..."  "\\n\\nHuman: ..."  "\\n\\nAssistant: ..."

A rendered prompt ends in ``"\\n\\nAssistant:"`` and a response starts with a space. After a text
prompt, one space is inserted before a response if neither has whitespace there, as the json files
of DeepSpeed-Chat require. A row without ``rejected`` is not a pair, and a row without ``chosen`` is
a prompt. K responses become all of their K (K - 1) / 2 pairs (https://arxiv.org/abs/2203.02155,
section 3.5) except those with equal scores. A pair of scored responses has the columns ``margin``,
``chosen_score`` and ``rejected_score``.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import combinations
from typing import Any

from rlhf.data.records import (
    ASSISTANT_TURN,
    SELECT_PART,
    SPEAKERS,
    Dropped,
    Message,
    Record,
    Row,
    UnusableRowError,
    find_learned_turns,
    normalize_text,
    render_prompt,
)

NO_COMMON_PROMPT = "chosen and rejected do not have the same messages before their last answer"
PROMPT_ELSEWHERE = "if the prompt is another column, data.sets.NAME.columns says which"
NOT_LEARNED = "all answers are excluded (weight=0 or train=false)"
TIE = "pairs of responses with equal scores"
NOT_ANSWERED = "conversations whose turns after the last answer are not used"
NOT_SCORED = "responses without text or score"
SCORES = ("margin", "chosen_score", "rejected_score")  # columns of a pair of scored responses
# Parts of the names of numbers that say how good a response is, the highest being the best.
SCORE_NAME_PARTS = ["scor", "rating", "rate", "reward", "grade", "prob"]
MARKS = {"true": True, "false": False}  # marks as the texts of a CSV file
ROLES = {speaker: role for role, speaker in SPEAKERS.items()}
# The last turn may follow a space instead of a blank line, as in DeepSpeed-Chat's own files.
TURN = re.compile(rf"(?:\A\s*|\n\n|\s(?=Assistant:\s*\Z))({'|'.join(ROLES)}):")


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


def is_blank(value: object) -> bool:
    """Return True if ``value`` is missing, or a blank text, or an empty list or object."""
    if isinstance(value, str):
        return not value or value.isspace()
    return is_missing(value) or value in ([], {})


def is_missing(value: object) -> bool:
    """Return True for null, and for NaN, which pandas writes for a missing value."""
    return value is None or (isinstance(value, float) and math.isnan(value))


def read_number(value: object) -> float | None:
    """Return a number, which may be written as text; None for any other value and for NaN."""
    try:
        number = float(value) if isinstance(value, str | int | float) else math.nan
    except (ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


def read_records(row: Row, left_out: Dropped) -> list[Record]:
    """Return the records of a row of targets; count responses that are not used in ``left_out``.

    Raises:
        UnusableRowError: if the row has no record; the message is the counted reason.
        DataError: if a value has the wrong type.
    """
    targets = row.values
    if "text" in targets:
        return [Record(text=row.text("text"))]
    asked = None
    if isinstance(targets.get("prompt"), list | dict):
        asked = _record_of_messages(row.messages("prompt"), row)
    elif "prompt" in targets:
        asked = _record_of_text_prompt(row.text("prompt"), row)
    if "responses" in targets:
        return _read_responses(row, asked, left_out)
    if "rejected" in targets:
        return [_read_pair(row, asked)]
    if "messages" in targets:
        answered = _read_conversation(row, left_out)
    else:
        answered = _read_response(row, "chosen", asked)
    grade = None if answered.chosen is None else _read_grade(row)
    return [answered if grade is None else answered._replace(grade=grade)]


def _read_pair(row: Row, asked: Record | None) -> Record:
    better = _read_response(row, "chosen", asked)
    if asked is not None and (better.chosen is None or is_missing(row.values["rejected"])):
        return better
    return _make_pair(better, _read_response(row, "rejected", asked))


def _make_pair(better: Record, worse: Record) -> Record:
    if (better.prompt, better.messages) != (worse.prompt, worse.messages):
        raise UnusableRowError(NO_COMMON_PROMPT)
    if better.chosen == worse.chosen:
        raise UnusableRowError("chosen equals rejected")
    for answer in (*better.turns[-1:], *worse.turns[-1:]):
        if answer.shown:
            raise UnusableRowError(f"{', '.join(answer.shown)} in an answer of a pair")
    return better._replace(rejected=worse.chosen, grade=None, turns=())


def _read_responses(row: Row, asked: Record | None, left_out: Dropped) -> list[Record]:
    responses = row.items("responses")
    target = next((name for name in ("scores", "ranks") if name in row.values), None)
    numbers = row.items(target) if target else range(len(responses))  # the best first: ranks
    if len(numbers) != len(responses):
        raise row.build_error(f"{target} has {len(numbers)} values for {len(responses)} responses.")
    answered = []
    for response, number in zip(responses, numbers, strict=True):
        score = read_number(number)
        if is_blank(response) or score is None:
            left_out.drop(NOT_SCORED, row.place)
            continue
        one_row = row._replace(values={**row.values, "chosen": response})
        grade = score if target == "scores" else -score
        record = _read_response(one_row, "chosen", asked)
        answered.append(record._replace(grade=grade, place=row.place))
    if not responses:
        raise UnusableRowError("responses is empty")
    if len({each.chosen for each in answered}) < len(answered):
        raise UnusableRowError("responses has the same text twice")
    if len(answered) == 1:
        return answered if target == "scores" else [answered[0]._replace(grade=None)]
    pairs = _compare_responses(answered, left_out)
    return pairs if target == "scores" else [pair._replace(columns=None) for pair in pairs]


def _compare_responses(answered: Sequence[Record], left_out: Dropped) -> list[Record]:
    """Return the pairs of responses to one prompt whose grades differ; count the others."""
    pairs = []
    for one, other in combinations(answered, 2):
        worse, better = sorted((one, other), key=lambda record: record.grade or 0.0)
        low, high = worse.grade or 0.0, better.grade or 0.0
        if low == high:
            left_out.drop(TIE, better.place)
            continue
        scores = dict(zip(SCORES, (high - low, high, low), strict=True))
        try:
            pair = _make_pair(better, worse)
        except UnusableRowError as reason:
            left_out.drop(str(reason), better.place)
        else:
            pairs.append(pair._replace(columns={**(better.columns or {}), **scores}))
    return pairs


def count_conflicts(row: Row, targets: Row, pair: Record, conflicts: Dropped) -> None:
    """Count what contradicts a pair in its ``row``: scores of its responses, or another prompt."""
    for name, value in row.values.items():
        other = name.replace("chosen", "rejected")
        if other != name and any(part in name for part in SCORE_NAME_PARTS):
            better, worse = read_number(value), read_number(row.values.get(other))
            if better is not None and worse is not None and better < worse:
                conflicts.drop(f"pairs whose {name} is below {other}", row.place)
    prompt, chosen = targets.values.get("prompt"), targets.values.get("chosen")
    if is_blank(prompt) or not isinstance(chosen, list) or len(chosen) == 1:
        return
    is_text = isinstance(prompt, str)
    asked = [prompt] if is_text else [message.text for message in targets.messages("prompt")]
    if any(normalize_text(str(text)) not in normalize_text(pair.prompt or "") for text in asked):
        conflict = "rows whose prompt is not in the conversation of chosen, which is used instead"
        conflicts.drop(conflict, row.place)


def read_marks(records: list[Record]) -> list[Record]:
    """Return ``records`` with marks in place of scores that are all 0 or 1, or all -1 or 1."""
    scores = {record.grade for record in records if record.grade is not None}
    if not (scores <= {0, 1} or scores <= {-1, 1}):
        return records
    return [r if r.grade is None else r._replace(grade=r.grade > 0) for r in records]


def pair_rivals(records: list[Record], left_out: Dropped) -> list[Record]:
    """Return ``records`` in which pairs replace scored responses to the same prompt.

    A scored response without a rival, and a record without a score, stay as they are.
    """
    rivals: defaultdict[str | None, list[Record]] = defaultdict(list)
    for record in records:
        if isinstance(record.grade, float):
            rivals[record.prompt].append(record)
    paired = []
    for record in records:
        same_prompt = rivals[record.prompt] if isinstance(record.grade, float) else []
        if not same_prompt[1:]:
            paired.append(record)
        elif record is same_prompt[0]:
            names = record.columns or {}
            for pair in _compare_responses(same_prompt, left_out):
                kept = {name: (pair.columns or {})[name] for name in names}
                paired.append(pair._replace(columns=kept or None))
    return paired


# ----------------------------------------------------------------- prompts and responses of one row


def _read_response(row: Row, column: str, asked: Record | None) -> Record:
    """Return a record of the prompt and, if ``column`` has a value, of the response in it.

    Messages that begin with the user, or with the system, are a whole conversation with its prompt.
    """
    value = row.values.get(column)
    if asked is not None and is_missing(value):
        return asked
    if isinstance(value, list | dict):
        return _read_message_response(row, column, asked)
    if asked is not None:
        return asked._replace(chosen=_add_space(asked, row.text(column)))
    before, turn, answer = row.text(column).rpartition(ASSISTANT_TURN)
    if not turn:
        raise UnusableRowError(f"{NO_COMMON_PROMPT}; {PROMPT_ELSEWHERE}")
    for name, part in (("prompt", before), (column, answer)):
        if not part.strip():
            raise UnusableRowError(f"{name} is empty")
    asked = _record_of_text_prompt(before + turn, row)
    return asked._replace(chosen=_add_space(asked, answer))


def _read_message_response(row: Row, column: str, asked: Record | None) -> Record:
    *before, last = row.messages(column)
    is_whole = asked is None or (bool(before) and before[0].role != "assistant")
    if last.role != "assistant" or (before and not is_whole):
        raise UnusableRowError(f"{column} does not end in one assistant turn")
    if asked is None or is_whole:
        asked = _record_of_messages(before, row)
    if not last.is_learned:
        raise _build_unlearned_error(last, column)
    if not last.shown:
        is_text = asked.messages is None
        answer = _add_space(asked, last.content) if is_text else f" {last.content}"
        return asked._replace(chosen=answer)
    if asked.messages is None or not {"rejected", "responses"}.isdisjoint(row.values):
        rule = "which is not allowed in a pair or in an answer to a text prompt"
        raise UnusableRowError(f"{column} has {', '.join(last.shown)}, {rule}")
    messages = tuple(message.excluded_from_loss() for message in asked.messages)
    return asked._replace(chosen=f" {last.text}", turns=(*messages, last))


def _build_unlearned_error(answer: Message, column: str) -> UnusableRowError:
    is_said = answer.content.strip() or answer.shown
    return UnusableRowError(NOT_LEARNED if is_said else f"{column} ends in an empty turn")


def _read_conversation(row: Row, left_out: Dropped) -> Record:
    """Return a record of the last answer to learn, with all turns if they have more to learn.

    Without an answer, it is a prompt; with one, a conversation with a later other turn is counted.
    """
    messages = row.messages("messages")
    learned = find_learned_turns(messages)
    if not learned:
        ends_in_answer = messages[-1].role == "assistant"
        asked = _record_of_messages(messages[:-1] if ends_in_answer else messages, row)
        if ends_in_answer:
            raise _build_unlearned_error(messages[-1], "messages")
        return asked
    *before, last = messages[: learned[-1] + 1]
    asked = _record_of_messages(before, row)
    if messages[-1].role != "assistant":
        left_out.drop(NOT_ANSWERED, row.place)
    turns = (*(asked.messages or ()), *messages[learned[-1] :])
    has_more = last.shown or sum(turn.role == "assistant" for turn in turns) > 1
    return asked._replace(chosen=f" {last.text}", turns=turns if has_more else ())


def _read_grade(row: Row) -> bool | float | None:
    name = next((name for name in ("grade", "rank") if name in row.values), None)
    if name is None:
        return None
    value = row.values[name]
    if is_blank(value):
        raise UnusableRowError(f"{name} is null")
    mark = MARKS.get(value.strip().lower()) if isinstance(value, str) else value
    if isinstance(mark, bool):
        return mark
    score = read_number(value)
    if score is None:
        raise row.build_error(
            f"the {name} is {value!r}; must be true, false or a number. {SELECT_PART}"
        )
    return -score if name == "rank" else score


def _add_space(asked: Record, response: str) -> str:
    """Return the response, with a space before it if it needs one to be joined to the prompt.

    After messages, it needs one unless it begins with exactly one space.
    """
    if asked.messages is not None:
        return response if re.match(r" \S", response) else f" {response}"
    ends_in_space = asked.prompt is not None and asked.prompt[-1].isspace()
    return response if ends_in_space or response[0].isspace() else f" {response}"


def _record_of_text_prompt(prompt: str, row: Row) -> Record:
    """Return a record of a text prompt, which is split into messages if a system text exists."""
    if is_blank(row.values.get("system")):
        return Record(prompt=prompt)
    messages, begun = split_turns(prompt)
    if begun:
        raise UnusableRowError("prompt has the start of an answer, and there is a system column")
    return _record_of_messages(messages, row)


def _record_of_messages(messages: Sequence[Message], row: Row) -> Record:
    """Return a record whose prompt is the row's column ``system``, if any, then ``messages``."""
    if not messages or not messages[-1].text.strip():
        raise UnusableRowError("prompt is empty")
    if messages[-1].role == "assistant":
        raise UnusableRowError("prompt ends in an assistant turn")
    if not is_blank(row.values.get("system")):
        if any(message.role == "system" for message in messages):
            raise UnusableRowError("has a system turn and a system column")
        messages = [Message("system", row.text("system")), *messages]
    return Record(prompt=render_prompt(messages), messages=tuple(messages))


# ------------------------------------------------------------------------- trees of conversations


def expand_threads(rows: Sequence[Row]) -> Iterator[tuple[Row, Row]]:
    """Yield the row and the targets of each question of oasst's trees, or of its flat messages.

    Replies with a rank are the question's responses, the lowest rank being the best; every other
    reply is a response without a rival.
    """
    nodes: dict[str, dict[str, Any]] = {
        str(row.values["message_id"]): {**row.values, "replies": []}
        for row in rows
        if "message_id" in row.values
    }
    for node in nodes.values():
        parent = nodes.get(str(node.get("parent_id")), {"replies": []})
        parent["replies"].append(node)
    for row in rows:
        root = nodes.get(str(row.values.get("message_id")), row.values.get("prompt"))
        if isinstance(root, dict) and str(root.get("parent_id")) not in nodes:
            for targets in _iterate_questions(root):
                yield row, row._replace(values=targets)


def _iterate_questions(root: dict[str, Any]) -> Iterator[dict[str, object]]:
    waiting: list[tuple[dict[str, Any], list[object]]] = [(root, [])]
    while waiting:
        node, before = waiting.pop()
        role = "user" if node.get("role") == "prompter" else "assistant"
        thread = [*before, {"role": role, "content": node.get("text")}]
        replies = node.get("replies")
        replies = replies if isinstance(replies, list) else []
        answers = [reply for reply in replies if isinstance(reply, dict)]
        waiting += [(reply, thread) for reply in reversed(answers)]
        ranked = [reply for reply in answers if reply.get("rank") is not None]
        if role == "user" and len(ranked) > 1:
            texts, ranks = ([reply.get(key) for reply in ranked] for key in ("text", "rank"))
            yield {"prompt": thread, "responses": texts, "ranks": ranks}
        for reply in answers if role == "user" else []:
            if len(ranked) == 1 or reply.get("rank") is None:
                yield {"prompt": thread, "chosen": reply.get("text")}
