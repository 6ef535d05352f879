"""Sequences of records that are no lists: records in temporary files, and selections of others.

A list of two million records needs over 3 GB. ``StoredRecords`` keeps records in files, and in
memory only fixed-size ``FACTS``, by which a data set is cleaned of repeats and divided.
"""

from __future__ import annotations

import json
import os
import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from operator import itemgetter
from typing import IO, Any, overload
from unicodedata import is_normalized

import numpy as np

from rlhf.data.records import (
    SPEAKERS,
    Message,
    RawDataset,
    Record,
    example_key,
    hash_normal,
    hidden_texts,
    normalize_text,
    prompt_key,
)

Numbers = np.ndarray[Any, Any]
REPEATED = "repeats an earlier example"
KEY = "V16"  # a hash of 16 bytes
COUNTS = np.dtype(
    [
        ("has_prompt", np.bool_),
        ("has_chosen", np.bool_),
        ("has_rejected", np.bool_),
        ("answers", np.uint16),  # of a conversation; 0: it is none, or has no response
        ("learned", np.uint16),  # those of them that SFT learns
    ]
)
FACTS = np.dtype(
    [
        ("counts", COUNTS),
        ("prompt_key", KEY),
        ("example_key", KEY),
        ("prompt_bytes", np.uint32),  # UTF-8 bytes of the prompt
        ("answer_bytes", np.uint32),  # UTF-8 bytes of the response, or of the text
        ("has_text", np.bool_),
        ("is_plain", np.bool_),  # True if its texts are in NFC, and plain turns show all of it
        ("file", np.uint16),  # index of the file that stores it
        ("start", np.uint64),  # byte in this file
        ("size", np.uint32),  # bytes in this file
    ]
)
# Fields that must have their defaults in a record whose texts are all that is learned of it.
MORE = ("seed", "turns", "tools", "grade")
read_more = itemgetter(*map(Record._fields.index, MORE))
NO_MORE = read_more(Record())
MAY_BE_SPECIAL = re.compile(r"<[|/\w\uff5c]|\[[A-Z]")  # how names of special tokens begin
PACK = json.JSONEncoder(check_circular=False, separators=(",", ":")).encode


def write_records(records: Iterable[Record], file: IO[bytes], number: int) -> Numbers:
    """Append ``records`` to ``file``, the file of this ``number``; return their ``FACTS``.

    Raises:
        TypeError: if a value, such as a date in a column of rewards, cannot be written as JSON.
    """
    facts = []
    start = file.tell()
    for record in records:
        size = file.write(_pack(record))
        facts.append((*_describe(record), number, start, size))
        start += size
    return np.array(facts, FACTS)


def _describe(record: Record) -> tuple[Any, ...]:
    """Return the facts of a record, without its place in a file."""
    prompt, chosen, _, text = record.texts
    normal = [None if each is None else normalize_text(each) for each in record.texts]
    return (
        _count_parts(record),
        hash_normal([normal[3] if prompt is None else normal[0]]),
        hash_normal([*normal, *map(normalize_text, hidden_texts(record))]),
        _count_bytes(prompt),
        _count_bytes(chosen if text is None else text),
        text is not None,
        read_more(record) == NO_MORE
        and all(map(_is_plain, record.messages or ()))
        and not (record.messages and any(MAY_BE_SPECIAL.search(t) for t in record.texts if t))
        and all(each is None or is_normalized("NFC", each) for each in record.texts),
    )


def _is_plain(message: Message) -> bool:
    return message.more is None and message.role in SPEAKERS


def _count_parts(record: Record) -> tuple[bool, bool, bool, int, int]:
    prompt, chosen, rejected, _ = record.texts
    is_talk = record.messages is not None and chosen is not None
    answers = (record.answers, record.learned_answers) if is_talk else (0, 0)
    return prompt is not None, chosen is not None, rejected is not None, *answers


def _count_bytes(text: str | None) -> int:
    if text is None:
        return 0
    return len(text) if text.isascii() else len(text.encode(errors="surrogatepass"))


def _pack(record: Record) -> bytes:
    """Return a record as JSON; raise a TypeError if ``_unpack`` would return another record."""
    packed = PACK(record).encode()
    has_values = record.columns or record.tools or any(map(_has_more, record.turns))
    if has_values and _unpack(packed) != record:
        raise TypeError("a value of a column changes as JSON")
    return packed


def _has_more(message: Message) -> bool:
    return message.more is not None


def _unpack(packed: bytes) -> Record:
    record = Record(*json.loads(packed))
    return record._replace(
        turns=tuple(Message(*each) for each in record.turns),
        messages=record.messages and tuple(Message(*each) for each in record.messages),
        place=record.place and (record.place[0], record.place[1]),
    )


class ReadRecords(Sequence[Record], ABC):
    """Records that are read one by one."""

    @abstractmethod
    def _read(self, index: int) -> Record:
        """Return the record at ``index``."""

    @overload
    def __getitem__(self, index: int) -> Record: ...
    @overload
    def __getitem__(self, index: slice) -> list[Record]: ...
    def __getitem__(self, index: int | slice) -> Record | list[Record]:
        """Return a record, or a list of records."""
        if isinstance(index, slice):
            return [self._read(each) for each in range(*index.indices(len(self)))]
        return self._read(index)


class StoredRecords(ReadRecords):
    """Records in temporary files that have no name, and end with this process."""

    def __init__(self, files: Sequence[IO[bytes]], facts: Numbers) -> None:
        """Store the open ``files``, and the facts of the records in their order."""
        self._files, self.facts = files, facts

    def __len__(self) -> int:
        """Return the number of records."""
        return len(self.facts)

    def _read(self, index: int) -> Record:
        fact = self.facts[index]
        file = self._files[fact["file"]].fileno()
        return _unpack(os.pread(file, int(fact["size"]), int(fact["start"])))


class Selection(ReadRecords):
    """Some records of other sequences, in an order of their own."""

    def __init__(self, sources: Sequence[Sequence[Record]], source_N: Numbers, row_N: Numbers):
        """Record ``i`` is ``sources[source_N[i]][row_N[i]]``; no source is a selection."""
        self.sources, self.source_N, self.row_N = sources, source_N, row_N

    def __len__(self) -> int:
        """Return the number of records."""
        return len(self.row_N)

    def _read(self, index: int) -> Record:
        source: Sequence[Record] = self.sources[self.source_N[index]]
        return source[int(self.row_N[index])]

    def __iter__(self) -> Iterator[Record]:
        """Yield the records in order."""
        return (self[index] for index in range(len(self)))


def is_in_memory(records: Sequence[Record]) -> bool:
    """Return True if ``records`` is a list; otherwise its records are read from files."""
    return isinstance(records, list)


def take(records: Sequence[Record], places: Sequence[int] | Numbers) -> Sequence[Record]:
    """Return the records at ``places``, in that order."""
    if is_in_memory(records):
        return [records[place] for place in places]
    whole = _as_selection(records)
    return Selection(whole.sources, whole.source_N[places], whole.row_N[places])


def join(parts: Sequence[Sequence[Record]]) -> Sequence[Record]:
    """Return the records of all ``parts``, one after another."""
    if all(map(is_in_memory, parts)):
        return [record for part in parts for record in part]
    wholes = [_as_selection(part) for part in parts]
    firsts = np.cumsum([0, *(len(each.sources) for each in wholes)])
    return Selection(
        [source for each in wholes for source in each.sources],
        np.concatenate([w.source_N + first for w, first in zip(wholes, firsts, strict=False)]),
        np.concatenate([each.row_N for each in wholes]),
    )


def prompt_keys(records: Sequence[Record]) -> Numbers:
    """Return the key of each record's prompt, or of its text if it has no prompt."""
    if is_in_memory(records):
        return _join_keys(map(prompt_key, records))
    return facts_of(records, "prompt_key")


def example_keys(records: Sequence[Record]) -> Numbers:
    """Return a key of all texts of each record."""
    if is_in_memory(records):
        return _join_keys(map(example_key, records))
    return facts_of(records, "example_key")


def counts_of(records: Sequence[Record]) -> Numbers:
    """Return the ``COUNTS`` of each record."""
    if is_in_memory(records):
        return np.array([_count_parts(record) for record in records], COUNTS)
    return facts_of(records, "counts")


def _join_keys(keys: Iterable[bytes]) -> Numbers:
    return np.array(bytearray(b"".join(keys)), np.uint8).view(KEY)


def facts_of(records: Sequence[Record], name: str) -> Numbers:
    """Return the fact ``name`` of each record, for records that are no list or few."""
    whole = _as_selection(records)
    found = np.empty(len(records), FACTS[name])
    for number, source in enumerate(whole.sources):
        own = whole.source_N == number
        rows = whole.row_N[own]
        if isinstance(source, StoredRecords):
            found[own] = source.facts[name][rows]
        else:
            facts = [(*_describe(source[row]), 0, 0, 0) for row in rows]
            found[own] = np.array(facts, FACTS)[name]
    return found


def number_groups(keys: Numbers) -> Numbers:
    """Return for each of ``keys`` the number of its group of equal keys, by first appearance."""
    halves = np.ascontiguousarray(keys).view(np.uint64).reshape(-1, 2)
    order = np.lexsort((halves[:, 1], halves[:, 0]))  # stable: equal keys stay in order
    ordered = halves[order]
    begins = np.ones(len(order), bool)
    begins[1:] = (ordered[1:] != ordered[:-1]).any(axis=1)
    rank = np.empty(int(begins.sum()), np.int64)
    rank[np.argsort(order[begins])] = np.arange(len(rank))
    numbers = np.empty(len(order), np.int64)
    numbers[order] = rank[np.cumsum(begins) - 1]
    return numbers


def first_of_groups(numbers: Numbers) -> Numbers:
    """Return for each number of ``number_groups`` whether it is the first of its group."""
    before = np.maximum.accumulate(np.concatenate([[-1], numbers]))[:-1]
    found: Numbers = numbers > before
    return found


def _as_selection(records: Sequence[Record]) -> Selection:
    if isinstance(records, Selection):
        return records
    size = len(records)
    return Selection([records], np.zeros(size, np.uint16), np.arange(size, dtype=np.uint32))


def drop_repeated_examples(datasets: Sequence[RawDataset]) -> list[RawDataset]:
    """Return ``datasets`` without examples that occur earlier in the same or another dataset.

    Training and held-out examples are compared separately: ``divide_over_phases`` later removes
    training examples whose prompt is held out.
    """
    train = _drop_repeated([each.train for each in datasets])
    held_out = _drop_repeated([each.eval or [] for each in datasets])
    found = []
    for each, kept, kept_eval in zip(datasets, train, held_out, strict=True):
        repeated = len(each.train) - len(kept) + len(each.eval or ()) - len(kept_eval)
        left_out = each.left_out + Counter({REPEATED: repeated})
        own_eval = None if each.eval is None else kept_eval
        found.append(each._replace(train=kept, eval=own_eval, left_out=left_out))
    return found


def _drop_repeated(parts: Sequence[Sequence[Record]]) -> list[Sequence[Record]]:
    keys = np.concatenate([example_keys(part) for part in parts])
    is_first = first_of_groups(number_groups(keys))
    ends = np.cumsum([0, *map(len, parts)])
    return [
        take(part, np.flatnonzero(is_first[start:end]))
        for part, (start, end) in zip(parts, pairwise(ends), strict=True)
    ]
