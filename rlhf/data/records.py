"""Define rows as read from files, the records made of them, and datasets; clean records."""

from __future__ import annotations

import hashlib
import json
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from rlhf.base.errors import DataError
from rlhf.base.packaged_yaml import read_yaml_beside
from rlhf.config.choices import Phase

SPEAKERS = {"system": "System", "user": "Human", "assistant": "Assistant"}
TOOL_SPEAKER = "Tool"  # of an observation with the role tool, in plain text
ASSISTANT_TURN = "\n\nAssistant:"
OTHER_ROLES: Mapping[str, list[str]] = read_yaml_beside(__file__, "roles.yaml")
# Names of roles in public files -> one of the four roles that chat templates know.
ROLES = {role: role for role in OTHER_ROLES}
ROLES |= {name: role for role, names in OTHER_ROLES.items() for name in names}
CALL_ROLE = "function_call"  # an assistant's message whose text is the call of a tool, as JSON
MESSAGE_RULE = "a message is an object with the keys 'role' and 'content' (or 'from' and 'value')"

TEXT_OF = {"role": "content", "from": "value"}  # key of a message's role -> key of its text
WEIGHTS = ("weight", "loss_weight", "train")  # keys whose value 0 excludes a message from the loss
THOUGHTS, CALLS = ("reasoning_content", "thinking"), "tool_calls"
TEMPLATE_KEYS = (*THOUGHTS, CALLS, "tool_call_id", "name")  # keys that templates read
MESSAGE_KEYS = frozenset({*TEXT_OF, *TEXT_OF.values(), *WEIGHTS, *TEMPLATE_KEYS})
SELECT_PART = "data.sets.NAME.columns can select a part of it (docs/data.md)."
SCORED = "response with a score, not a good/bad label"  # the reason for which SFT skips a response
TEXT_FIELDS = ("prompt", "chosen", "rejected", "text")
LINE_ENDS = re.compile(r"[ \t]*(?:\r\n?|[\n\v\f\x85])")
# Control characters other than whitespace, and lone surrogates, which UTF-8 cannot encode.
UNPRINTABLE = re.compile(r"[\x00-\x08\x0e-\x1f\x7f-\x84\x86-\x9f\ud800-\udfff]")

V = TypeVar("V")
Place = tuple[str, int]  # a file (or hub dataset), and the number of a row in it, from 1
MOST_PLACES = 5  # first places that are kept of the rows dropped for one reason


class Dropped(Counter[str]):
    """Numbers of dropped rows by reason; ``places`` has the first places of each reason."""

    def __init__(self, counts: Mapping[str, int] | None = None) -> None:
        """Start with ``counts`` of rows whose places are not known."""
        super().__init__(counts or {})
        self.places: dict[str, list[Place]] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        """Include the places when another process gets a copy."""
        return Dropped, (dict(self),), {"places": self.places}

    def drop(self, reason: str, place: Place | None) -> None:
        """Count one row."""
        self.drop_all(reason, 1, [place] if place else [])

    def drop_all(self, reason: str, count: int, places: Sequence[Place]) -> None:
        """Count ``count`` rows, the first of which are at ``places``."""
        self[reason] += count
        kept = self.places.setdefault(reason, [])
        kept += places[: MOST_PLACES - len(kept)]


def join_dropped(parts: Iterable[Dropped]) -> Dropped:
    """Return the numbers and places of all ``parts``."""
    whole = Dropped()
    for part in parts:
        for reason, count in part.items():
            whole.drop_all(reason, count, part.places.get(reason, []))
    return whole


def describe_first_place(places: Sequence[Place | None] | None) -> str:
    """Return text that names the first of ``places``, to end a reason; "" if there is no place."""
    place = places[0] if places else None
    return f" (first: {place[0]}, row {place[1]})" if place else ""


class Message(NamedTuple):
    """One turn of a conversation; ``role`` is a key of ``SPEAKERS``, or tool."""

    role: str
    content: str
    more: Mapping[str, Any] | None = None
    """Other keys that chat templates read, and weight=0 if the message must not be learned."""

    @property
    def is_learned(self) -> bool:
        """Return True if SFT may learn the message: an answer whose weight is not 0."""
        is_said = self.content.strip() or self.shown
        return self.role == "assistant" and bool(is_said) and (self.more or {}).get("weight") != 0

    @property
    def shown(self) -> dict[str, Any]:
        """Return the keys that only chat templates show, such as tool_calls."""
        return {key: value for key, value in (self.more or {}).items() if key in TEMPLATE_KEYS}

    @property
    def thought(self) -> str:
        """Return the thought that the message has beside its content; "" if it has none."""
        return str(next((self.shown[key] for key in THOUGHTS if key in self.shown), ""))

    @property
    def text(self) -> str:
        """Return the content, or the calls of tools if there is no content."""
        calls = self.shown.get(CALLS)
        return json.dumps(calls, ensure_ascii=False) if calls and not self.content else self.content

    def excluded_from_loss(self) -> Message:
        """Return the message, excluded from what SFT learns."""
        return self._replace(more={**(self.more or {}), "weight": 0})


class Record(NamedTuple):
    """One example; a field that its source does not have is None.

    ``chosen`` is the better of two responses, or the only response. Prompt and response are joined
    without a separator: both contain their own whitespace.
    """

    prompt: str | None = None
    chosen: str | None = None
    rejected: str | None = None
    text: str | None = None
    columns: Mapping[str, Any] | None = None
    """Other columns of its row, which rewards read; None: no reward reads any."""
    seed: int | None = None
    """The seed of the episode that the prompt begins; None: the prompt begins no episode."""
    turns: tuple[Message, ...] = ()
    """The whole conversation, if SFT learns more from it than the text of ``chosen``."""
    messages: tuple[Message, ...] | None = None
    """The messages of the prompt if its source has any; ``prompt`` shows them as text."""
    tools: Sequence[Any] | None = None
    """The tools that a conversation may call, as chat templates take them."""
    place: Place | None = None
    """The file and row that it was read from."""
    grade: bool | float | None = None
    """The source's mark or score of ``chosen``, if that is the only response."""

    @property
    def texts(self) -> tuple[str | None, ...]:
        """Return prompt, chosen, rejected and text, each of which may be None."""
        return (self.prompt, self.chosen, self.rejected, self.text)

    @property
    def all_texts(self) -> tuple[str | None, ...]:
        """Return ``texts``, and the texts of the turns that follow the prompt."""
        after = self.turns[len(self.messages or ()) :]
        return self.texts + tuple(
            f" {turn.text}" if turn.role == "assistant" else turn.text for turn in after
        )

    @property
    def num_answers(self) -> int:
        """Return the number of answers in the conversation, the prompt's included."""
        messages = self.turns or self.messages or ()
        earlier = sum(message.role == "assistant" for message in messages)
        return earlier + (self.chosen is not None and not self.turns)

    @property
    def num_learned_answers(self) -> int:
        """Return the number of answers that SFT learns."""
        if self.turns:
            return len(find_learned_turns(self.turns))
        return int(self.chosen is not None)


def describe_row(record: Record) -> str:
    """Return file and row of a record, or its prompt."""
    if record.place is not None:
        return "{}, row {}".format(*record.place)
    return f"the row with the prompt {(record.prompt or '')[:60]!r}"


def find_learned_turns(turns: Sequence[Message]) -> list[int]:
    """Return the indices of the answers that SFT learns: those to a user, a tool or a system."""
    asks = [False, *(message.role != "assistant" for message in turns)]
    return [i for i, message in enumerate(turns) if asks[i] and message.is_learned]


def learn_last_answer(record: Record) -> Record:
    """Return the record with all learned answers but the last excluded from the loss."""
    *earlier, _ = find_learned_turns(record.turns) or [0]
    turns = list(record.turns)
    for index in earlier:
        turns[index] = turns[index].excluded_from_loss()
    return record._replace(turns=tuple(turns)) if earlier else record


def render_prompt(messages: Sequence[Message]) -> str:
    """Return the messages as text that ends where the answer begins; skip blank messages."""
    speakers = {**SPEAKERS, "tool": TOOL_SPEAKER}
    spoken = [(speakers[each.role], each.text) for each in messages if each.text.strip()]
    return "".join(f"\n\n{name}: {text}" for name, text in spoken) + ASSISTANT_TURN


def seeds_of_records(records: Sequence[Record]) -> list[int] | None:
    """Return the seeds of the records' episodes; None if no record begins an episode."""
    return [record.seed for record in records if record.seed is not None] or None


class RawDataset(NamedTuple):
    """One dataset as read: its usable records, and counts of the dropped rows."""

    name: str
    train: Sequence[Record]
    eval: Sequence[Record] | None
    """Held-out records that come with the dataset; None: it has none."""
    layout: str
    left_out: Dropped
    """Dropped rows, by reason."""
    weight: float = 1.0
    """Number of times that its training records are used."""
    phases: Sequence[Phase] | None = None
    """The only phases that use it; None: all phases."""
    read: tuple[str, ...] = ()
    """Columns that hold values and are read."""
    unread: tuple[str, ...] = ()
    """Columns and keys of messages that hold values and are not read."""
    sides: str = ""
    """Text that names the files or rows to train on and to hold out; "" if nothing selects them."""
    varied: Mapping[str, str] = {}
    """Unread columns whose values differ, and the first different values."""
    conflicts: Dropped = Dropped()
    """Used rows whose columns contradict each other, counted by how."""


class UnusableRowError(Exception):
    """The error for a row that cannot be used; its message is the counted reason."""


class OddRowError(UnusableRowError):
    """The error for a row that is skipped only if most rows are well-formed."""

    def __init__(self, reason: str, fault: DataError) -> None:
        """Store the error that is raised if most rows are odd."""
        super().__init__(reason)
        self.fault = fault


class Row(NamedTuple):
    """One row as read, and its origin: ``file`` (or hub dataset) and ``number``, from 1.

    The methods ``text``, ``items`` and ``messages`` raise UnusableRowError for null or blank text,
    and a DataError that names the file and the row for a value of another type; ``messages`` raises
    OddRowError for a malformed message.
    """

    file: str
    number: int
    values: Mapping[str, object]

    @property
    def place(self) -> Place:
        """Return the file and the number."""
        return self.file, self.number

    def build_error(self, problem: str) -> DataError:
        """Return a ``DataError`` that names the file and row of the ``problem``."""
        return DataError(f"{self.file}, row {self.number}: {problem}")

    def text(self, column: str) -> str:
        """Return the text of ``column``."""
        value = self._read_value(column, str, "text")
        if not value.strip():
            raise UnusableRowError(f"{self._name(column)} is empty")
        return value

    def items(self, column: str) -> list[object]:
        """Return the list of ``column``."""
        return self._read_value(column, list, "a list")

    def messages(self, column: str) -> list[Message]:
        """Return the messages of ``column``, which holds a list of messages or a single message."""
        if isinstance(value := self.values.get(column), dict):
            items, places = [value], [column]
        else:
            items = self._read_value(column, list, "a list of messages")
            places = [f"{column}[{index}]" for index in range(len(items))]
        if not items:
            raise UnusableRowError(f"{self._name(column)} is empty")
        return [self._read_message(item, at) for item, at in zip(items, places, strict=True)]

    def tools(self) -> list[Any] | None:
        """Return the tools of the row, a list or its JSON; None if there are none."""
        value = self.values.get("tools")
        if isinstance(value, str) and value.strip():
            value = _read_json(value) or value
        if value and not isinstance(value, list):
            kind = type(value).__name__
            raise self._build_odd_row("tools", f"is of type {kind}", "must be a list, or its JSON")
        return list(value) if isinstance(value, list) and value else None

    def _name(self, column: str) -> str:
        """Return ``column``, but "response" for chosen if the row has no rejected response."""
        is_only = column == "chosen" and "rejected" not in self.values
        return "response" if is_only else column

    def _build_odd_row(self, place: str, problem: str, rule: str = "must be text") -> OddRowError:
        """Return the error for a row with a malformed value at ``place``, such as messages[1]."""
        kind = re.sub(r"\[\d+\]", "[]", place)
        fault = self.build_error(f"{place} {problem}; {rule}. {SELECT_PART}")
        return OddRowError(f"{kind} {problem}", fault)

    def _read_value(self, column: str, wanted: type[V], rule: str) -> V:
        value = self.values.get(column)
        if value is None:
            raise UnusableRowError(f"{self._name(column)} is null")
        if not isinstance(value, wanted):
            is_nested = isinstance(value, list | dict)
            raise self.build_error(
                f"column '{column}' holds a value of type {type(value).__name__}; "
                f"must be {rule} or null.{f' {SELECT_PART}' if is_nested else ''}"
            )
        return value

    def _read_message(self, item: object, place: str) -> Message:
        if not isinstance(item, dict):
            raise self._build_odd_row(place, f"is of type {type(item).__name__}", MESSAGE_RULE)
        keys = next(((r, c) for r, c in TEXT_OF.items() if r in item and c in item), None)
        if keys is None and item.get("role") and item.get(CALLS):
            keys = ("role", "content")
        if keys is None:
            raise self._build_odd_row(place, f"has the keys {list(item)}", MESSAGE_RULE)
        name, content = item[keys[0]], item.get(keys[1])
        more = self._read_more(item, place)
        if name == CALL_ROLE and isinstance(content, str):
            call = _read_json(content)
            if not isinstance(call, dict):
                raise self._build_odd_row(place, f"has the role {name!r}", "must be JSON")
            more[CALLS] = [{"type": "function", "function": call}]
            name, content = "assistant", ""
        role = ROLES.get(name) if isinstance(name, str) else None
        if role is None:
            known = f"must be one of {', '.join((*ROLES, CALL_ROLE))}"
            raise self._build_odd_row(place, f"has the role {name!r}", known)
        if content is None and more.keys() & {CALLS, *THOUGHTS}:
            content = ""
        if isinstance(content, list):
            content = self._join_parts(content, place)
        if not isinstance(content, str):
            raise self._build_odd_row(place, f"has content of type {type(content).__name__}")
        return Message(role, content, more or None)

    def _read_more(self, item: Mapping[str, Any], place: str) -> dict[str, Any]:
        """Return what ``Message.more`` stores; raise DataError for a weight other than 0 and 1."""
        kept = {key: item[key] for key in TEMPLATE_KEYS if item.get(key)}
        weights = {key: item[key] for key in WEIGHTS if item.get(key) is not None}
        for key, weight in weights.items():
            if weight not in (0, 1):
                raise self.build_error(
                    f"{place} has {key}={weight!r}; must be 0 (skip) or 1 (learn)."
                )
        return kept | ({"weight": 0} if 0 in weights.values() else {})

    def _join_parts(self, parts: list[Any], place: str) -> str:
        """Return the text of a content that is a list of parts; raise OddRowError for an image."""
        texts = []
        for part in parts:
            typed = part if isinstance(part, dict) else {"type": "text", "text": part}
            kind, text = typed.get("type"), typed.get("text") or typed.get("value") or ""
            if kind != "text" or not isinstance(text, str):
                raise self._build_odd_row(place, f"has a part of type {kind}")
            texts.append(text)
        return "".join(texts)


def _read_json(text: str) -> Any:
    """Return the value of a JSON text; None if it is not JSON."""
    try:
        return json.loads(text)
    except ValueError:
        return None


def clean_text(text: str) -> str:
    """Return ``text`` in Unicode NFC, with newlines as line ends and without control characters.

    Trailing whitespace of inner lines is removed too. Whitespace at the end of the text stays,
    since a prompt or a response may need it.
    """
    if text.isprintable() and (text.isascii() or unicodedata.is_normalized("NFC", text)):
        return text  # most texts of one line: many times faster
    return LINE_ENDS.sub("\n", UNPRINTABLE.sub("", unicodedata.normalize("NFC", text)))


def clean_records(records: Sequence[Record], left_out: Dropped) -> list[Record]:
    """Return ``records`` with clean texts; drop and count those that are unusable afterwards."""
    kept = []
    for record in records:
        cleaned = _clean_record(record)
        reason = _find_unusable_reason(cleaned)
        if reason:
            left_out.drop(f"{reason} after cleaning", record.place)
        else:
            kept.append(cleaned)
    return kept


def _clean_record(record: Record) -> Record:
    texts = tuple([part and clean_text(part) for part in record.texts])
    if not record.messages and not record.turns and texts == record.texts:
        return record
    messages, turns = _clean_messages(record.messages), _clean_messages(record.turns)
    prompt, chosen, rejected, text = texts
    return record._replace(
        prompt=render_prompt(messages) if messages else prompt,
        chosen=chosen,
        rejected=rejected,
        text=text,
        messages=messages,
        turns=turns or (),
    )


def _clean_messages(messages: tuple[Message, ...] | None) -> tuple[Message, ...] | None:
    if not messages:
        return messages
    return tuple(message._replace(content=clean_text(message.content)) for message in messages)


def _find_unusable_reason(record: Record) -> str | None:
    for name, part in zip(TEXT_FIELDS, record.texts, strict=True):
        if part is not None and (not part or part.isspace()):
            is_only = name == "chosen" and record.rejected is None
            return f"{'response' if is_only else name} is empty"
    if record.rejected is not None and record.chosen == record.rejected:
        return "chosen equals rejected"
    return None


def normalize_text(text: str) -> str:
    """Return ``text`` without differences in white space and case."""
    if text.isascii() and text.isprintable() and "  " not in text:
        return text.strip().lower()  # the same, several times faster
    return " ".join(text.split()).casefold()


def fingerprint(*texts: str | None) -> bytes:
    """Return a 16-byte hash that is equal for texts that differ only in white space and case."""
    normal = ["\x1e" if text is None else normalize_text(text) for text in texts]  # no separators
    data = "\x1f".join(normal).encode(errors="surrogatepass")
    return hashlib.blake2b(data, digest_size=16).digest()  # faster than SHA-256


def prompt_key(record: Record) -> bytes:
    """Return the key of a record's group: a hash of its prompt, or of its text if it has none."""
    return fingerprint(record.text if record.prompt is None else record.prompt)


def example_key(record: Record) -> bytes:
    """Return a hash of texts, thoughts, tools and grade: repeated examples have equal hashes."""
    hidden = [str(turn.shown) for turn in record.turns if turn.shown]
    hidden += [str(value) for value in (record.tools, record.grade) if value is not None]
    return fingerprint(*record.texts, *hidden)


def find_reversed_pairs(records: Iterable[Record]) -> Iterator[tuple[int, int]]:
    """Yield (earlier index, index) of each pair that is the reverse of an earlier pair.

    Differences in white space and case are ignored, as in ``example_key``.
    """
    index_of_pair: dict[bytes, int] = {}
    for index, record in enumerate(records):
        if record.prompt is not None and record.chosen and record.rejected:
            prompt, better, worse, _ = record.texts
            if (earlier := index_of_pair.get(fingerprint(prompt, worse, better))) is not None:
                yield earlier, index
            index_of_pair.setdefault(fingerprint(prompt, better, worse), index)
