"""Define rows as read from files, the records made of them, and datasets; clean records."""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from rlhf.base.errors import DataError
from rlhf.base.hashing import blake2b_of
from rlhf.config.choices import Phase

SPEAKERS = {"system": "System", "user": "Human", "assistant": "Assistant"}
SHAREGPT_ROLES = {"human": "user", "gpt": "assistant"}
MESSAGE_RULE = "a message is an object with the keys 'role' and 'content' (or 'from' and 'value')."

TEXT_OF = {"role": "content", "from": "value"}  # key of a message's role -> key of its text
WEIGHTS = ("weight", "loss_weight", "train")  # keys whose value 0 excludes a message from the loss
THOUGHT = "reasoning_content"
WAY_OUT = "data.sets.NAME.columns can select a part of it (docs/data.md)."
REMOVE_OR_SELECT = "remove such rows, or select what to read by data.sets.NAME.columns."
LINE_ENDS = re.compile(r"[ \t]*(?:\r\n?|[\n\v\f\x85])")
# Control characters other than whitespace, and lone surrogates, which UTF-8 cannot encode.
UNPRINTABLE = re.compile(r"[\x00-\x08\x0e-\x1f\x7f-\x84\x86-\x9f\ud800-\udfff]")
REPEATED = "repeats an earlier example"

V = TypeVar("V")


class Message(NamedTuple):
    """One turn of a conversation; ``role`` is a key of ``SPEAKERS``."""

    role: str
    content: str


class Exchange(NamedTuple):
    """A response to learn, and the observation after it, in an example with several responses."""

    response: str
    observation: str | None
    """The message that followed the response; None: no message followed."""
    role: str = "user"
    """The role of the observation: user or tool."""


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
    exchanges: tuple[Exchange, ...] = ()
    """The turns of an example that has several responses to learn."""
    messages: tuple[Message, ...] | None = None
    """The messages of the prompt if its source has any; ``prompt`` shows them as text."""
    place: tuple[str, int] | None = None
    """The file and row that it was read from."""
    grade: bool | float | None = None
    """How good ``chosen`` is by its source, if it is the only response: a mark, or a score."""

    @property
    def texts(self) -> tuple[str | None, ...]:
        """Return prompt, chosen, rejected and text, each of which may be None."""
        return (self.prompt, self.chosen, self.rejected, self.text)

    @property
    def all_texts(self) -> tuple[str | None, ...]:
        """Return ``texts``, and the response and the observation of every exchange."""
        return self.texts + tuple(
            text for each in self.exchanges for text in (each.response, each.observation)
        )


def seeds_of_records(records: Sequence[Record]) -> list[int] | None:
    """Return the seeds of the records' episodes; None if no record begins an episode."""
    return [record.seed for record in records if record.seed is not None] or None


class RawDataset(NamedTuple):
    """One dataset as read: its usable records, and counts of the dropped rows."""

    name: str
    train: list[Record]
    eval: list[Record] | None
    """Held-out records that come with the dataset; None: it has none."""
    layout: str
    left_out: Counter[str]
    """Number of dropped rows, by reason."""
    weight: float = 1.0
    """Number of times that its training records are used."""
    phases: Sequence[Phase] | None = None
    """The only phases that use it; None: all phases."""
    unread: tuple[str, ...] = ()
    """Columns and keys of messages that hold values and are not read."""
    sides: str = ""
    """The names of the files to train on and held out; "" if there is only one file."""


class UnusableRowError(Exception):
    """The error for a well-formed row that cannot be used; its message is the counted reason."""


class Row(NamedTuple):
    """One row as read, and its origin: ``file`` (or hub dataset) and ``number``, from 1.

    The methods ``text``, ``texts`` and ``messages`` raise UnusableRowError for null or blank text,
    and a DataError that names the file and the row for a value of another type.
    """

    file: str
    number: int
    values: Mapping[str, object]

    def build_error(self, problem: str) -> DataError:
        """Return a ``DataError`` that names the file and row of the ``problem``."""
        return DataError(f"{self.file}, row {self.number}: {problem}")

    def text(self, column: str) -> str:
        """Return the text of ``column``."""
        value = self._read_value(column, str, "text")
        if not value.strip():
            raise UnusableRowError(f"{column} is empty")
        return value

    def texts(self, column: str) -> list[str]:
        """Return the texts of ``column``, at least one, and none of them blank."""
        items: list[object] = self._read_value(column, list, "a list of texts")
        for index, item in enumerate(items):
            if not isinstance(item, str | None):
                kind = type(item).__name__
                raise self.build_error(f"{column}[{index}] is of type {kind}; must be text.")
        texts = [item for item in items if isinstance(item, str) and item.strip()]
        if not texts or len(texts) < len(items):
            raise UnusableRowError(f"{column} is empty, or has an empty text")
        return texts

    def messages(self, column: str) -> list[Message]:
        """Return the messages of ``column``, which holds a list of messages or a single message.

        A last message of the assistant is a response to learn. UnusableRowError is raised if one of
        its keys excludes it from the loss, and DataError if its thought has a key of its own.
        """
        if isinstance(value := self.values.get(column), dict):
            items, places = [value], [column]
        else:
            items = self._read_value(column, list, "a list of messages")
            places = [f"{column}[{index}]" for index in range(len(items))]
        if not items:
            raise UnusableRowError(f"{column} is empty")
        found = [self._read_message(item, at) for item, at in zip(items, places, strict=True)]
        if found[-1].role == "assistant":
            self._require_learnable(items[-1], places[-1])
        return found

    def _require_learnable(self, item: Mapping[str, object], place: str) -> None:
        for key in WEIGHTS:
            weight = item.get(key)
            if weight in (0, False):
                raise UnusableRowError(f"the answer has {key}={weight}: not to be learned")
            if weight not in (None, 1):
                raise self.build_error(
                    f"{place} has {key}={weight!r}; must be 0 (skip) or 1 (learn)."
                )
        if item.get(THOUGHT):
            raise self.build_error(
                f"{place} has {THOUGHT} beside its content, which would be lost. Learn both with "
                "data.sets.NAME.columns={prompt: 'messages[:-1]', chosen: \"join('', ['<think>', "
                f"messages[-1].{THOUGHT}, '</think>', messages[-1].content])\"}} (docs/data.md)."
            )

    def _read_value(self, column: str, wanted: type[V], rule: str) -> V:
        value = self.values.get(column)
        if value is None:
            raise UnusableRowError(f"{column} is null")
        if not isinstance(value, wanted):
            is_nested = isinstance(value, list | dict)
            raise self.build_error(
                f"column '{column}' holds a value of type {type(value).__name__}; "
                f"must be {rule} or null.{f' {WAY_OUT}' if is_nested else ''}"
            )
        return value

    def _read_message(self, item: object, place: str) -> Message:
        if not isinstance(item, dict):
            raise self.build_error(f"{place} is of type {type(item).__name__}; {MESSAGE_RULE}")
        keys = next(((r, c) for r, c in TEXT_OF.items() if {r, c} <= item.keys()), None)
        if keys is None:
            raise self.build_error(f"{place} has the keys {list(item)}; {MESSAGE_RULE}")
        role, content = (item[key] for key in keys)
        if item.get("tool_calls"):
            raise self.build_error(
                f"{place} has tool_calls, which cannot be learned: {REMOVE_OR_SELECT}"
            )
        role = SHAREGPT_ROLES.get(str(role), role)
        if role not in list(SPEAKERS):  # ``role`` may be unhashable, so a list is searched
            known = f"must be one of {list(SPEAKERS)}"
            raise self.build_error(f"{place} has the role {role!r}; {known}: {REMOVE_OR_SELECT}")
        if not isinstance(content, str):
            kind = type(content).__name__
            raise self.build_error(f"{place} has content of type {kind}; must be text. {WAY_OUT}")
        return Message(role, content)


def clean_text(text: str) -> str:
    """Return ``text`` in Unicode NFC, with newlines as line ends and without control characters.

    Trailing whitespace of inner lines is removed too. Whitespace at the end of the text stays,
    since a prompt or a response may need it.
    """
    return LINE_ENDS.sub("\n", UNPRINTABLE.sub("", unicodedata.normalize("NFC", text)))


def clean_dataset(dataset: RawDataset) -> RawDataset:
    """Return ``dataset`` with clean texts; drop and count examples that are unusable afterwards."""
    left_out = Counter(dataset.left_out)
    train = _clean_records(dataset.train, left_out)
    held_out = None if dataset.eval is None else _clean_records(dataset.eval, left_out)
    return dataset._replace(train=train, eval=held_out, left_out=left_out)


def _clean_records(records: list[Record], left_out: Counter[str]) -> list[Record]:
    kept = []
    for record in records:
        texts = [None if part is None else clean_text(part) for part in record.texts]
        said = record.messages and tuple(Message(m[0], clean_text(m[1])) for m in record.messages)
        prompt, chosen, rejected, text = texts
        cleaned = record._replace(
            prompt=prompt, chosen=chosen, rejected=rejected, text=text, messages=said
        )
        reason = _find_unusable_reason(cleaned)
        if reason:
            left_out[f"{reason} after cleaning"] += 1
        else:
            kept.append(cleaned)
    return kept


def _find_unusable_reason(record: Record) -> str | None:
    for name, part in zip(Record._fields, record.texts, strict=False):
        if part is not None and not part.strip():
            return f"{name} is empty"
    if record.rejected is not None and record.chosen == record.rejected:
        return "chosen equals rejected"
    return None


def fingerprint(*texts: str | None) -> bytes:
    """Return a 16-byte hash that is equal for texts that differ only in whitespace and case."""
    same = (None if text is None else " ".join(text.split()).casefold() for text in texts)
    return blake2b_of(repr(tuple(same)).encode())


def drop_repeated_examples(datasets: Sequence[RawDataset]) -> list[RawDataset]:
    """Return ``datasets`` without examples that occur earlier in the same or another dataset.

    Training and held-out examples are compared separately: ``divide_over_phases`` later removes
    training examples whose prompt is held out.
    """
    seen_train: set[bytes] = set()
    seen_eval: set[bytes] = set()
    found = []
    for each in datasets:
        train = _drop_repeated(each.train, seen_train)
        held_out = None if each.eval is None else _drop_repeated(each.eval, seen_eval)
        repeated = len(each.train) - len(train) + len(each.eval or ()) - len(held_out or ())
        left_out = each.left_out + Counter({REPEATED: repeated})
        found.append(each._replace(train=train, eval=held_out, left_out=left_out))
    return found


def _drop_repeated(records: list[Record], seen: set[bytes]) -> list[Record]:
    kept = []
    for record in records:
        mark = fingerprint(*record.texts)
        if mark not in seen:
            seen.add(mark)
            kept.append(record)
    return kept
