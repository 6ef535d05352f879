"""Store records in files; select records from such stores and from lists.

A list of two million records needs over 3 GB. ``Store`` keeps records as JSON in a file, and in
memory only ``FACTS`` of fixed size, with which repeats are found and a data set is divided.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Sequence
from mmap import ACCESS_READ, MADV_RANDOM, mmap
from operator import itemgetter
from typing import IO, Any, NamedTuple, overload
from unicodedata import is_normalized

import numpy as np

from rlhf.data.records import (
    MOST_PLACES,
    SPEAKERS,
    Message,
    RawDataset,
    Record,
    example_key,
    join_dropped,
    prompt_key,
)

Numbers = np.ndarray[Any, Any]
REPEATED = "repeats an earlier example"
KEY_DTYPE = "V16"  # a hash of 16 bytes
UNKNOWN = 2**32 - 1  # stands for an unknown number of bytes
COUNTS = np.dtype(
    [
        ("has_prompt", np.bool_),
        ("has_chosen", np.bool_),
        ("has_rejected", np.bool_),
        ("answers", np.uint16),  # in a conversation; 0: no conversation, or no response
        ("learned", np.uint16),  # answers that SFT learns
    ]
)
# UTF-8 bytes of a plain prompt, and of a plain prompt with its response, or of a text.
BYTES = np.dtype([("prompt", np.uint32), ("answered", np.uint32)])
FACTS = np.dtype(
    [
        ("counts", COUNTS),
        ("prompt_key", KEY_DTYPE),  # of the prompt, or of the text if there is no prompt
        ("example_key", KEY_DTYPE),  # of texts, thoughts, tools and grade
        ("bytes", BYTES),
    ]
)
# Fields that must have their defaults if a record is learned only from its texts.
BESIDE_TEXTS = ("seed", "turns", "tools", "grade")
read_beside_texts = itemgetter(*map(Record._fields.index, BESIDE_TEXTS))
NOTHING_BESIDE_TEXTS = read_beside_texts(Record())
MAY_BE_SPECIAL = re.compile(r"<[|/\w\uff5c]|\[[A-Z]")  # how names of special tokens begin
PACK = json.JSONEncoder(ensure_ascii=False, check_circular=False, separators=(",", ":")).encode


def _count_parts(record: Record) -> tuple[bool, bool, bool, int, int]:
    prompt, chosen, rejected, _ = record.texts
    is_talk = record.messages is not None and chosen is not None
    answers = (record.num_answers, record.num_learned_answers) if is_talk else (0, 0)
    return prompt is not None, chosen is not None, rejected is not None, *answers


def _join_keys(keys: Iterable[bytes]) -> Numbers:
    return np.array(bytearray(b"".join(keys)), np.uint8).view(KEY_DTYPE)


def _count_bytes(record: Record) -> tuple[int, int]:
    """Return the UTF-8 bytes of the prompt, and of all that SFT reads; UNKNOWN if there is none.

    Both are UNKNOWN for a record that is not plain. A record is plain if its texts are in NFC, and
    plain turns show all of it.
    """
    if not _is_plain(record):
        return UNKNOWN, UNKNOWN
    prompt, chosen, _, text = (
        len(part if part.isascii() else part.encode(errors="surrogatepass")) if part else 0
        for part in record.texts
    )
    answered = prompt + chosen if prompt and chosen else 0
    if record.text is not None:
        answered = text
    return prompt or UNKNOWN, answered or UNKNOWN


def _is_plain(record: Record) -> bool:
    messages = record.messages or ()
    return (
        read_beside_texts(record) == NOTHING_BESIDE_TEXTS
        and all([t is None or t.isascii() or is_normalized("NFC", t) for t in record.texts])
        and all([turn.more is None and turn.role in SPEAKERS for turn in messages])
        and not (messages and any(MAY_BE_SPECIAL.search(text) for text in record.texts if text))
    )


FACT_FINDERS: dict[str, Callable[[Sequence[Record]], Any]] = {
    "counts": lambda records: [_count_parts(record) for record in records],
    "prompt_key": lambda records: _join_keys(map(prompt_key, records)),
    "example_key": lambda records: _join_keys(map(example_key, records)),
    "bytes": lambda records: [_count_bytes(record) for record in records],
}


class PackedRecords(NamedTuple):
    """Some records as JSON texts, the sizes of these texts, and the ``FACTS`` of the records."""

    texts: bytes
    sizes: Numbers
    facts: Numbers


def pack_records(records: Sequence[Record]) -> PackedRecords:
    """Return ``records`` as JSON, with their facts.

    Raises:
        TypeError: if a value, such as a date in a column of rewards, changes as JSON.
    """
    texts = [_pack(record) for record in records]
    facts = np.empty(len(records), FACTS)
    for name, find in FACT_FINDERS.items():
        facts[name] = find(records)
    return PackedRecords(b"".join(texts), np.array([*map(len, texts)], np.int64), facts)


def _pack(record: Record) -> bytes:
    text = PACK(record).encode(errors="surrogatepass")
    has_values = record.columns or record.tools or any([turn.more for turn in record.turns])
    if has_values and _unpack(text) != record:
        raise TypeError("a column has a value that JSON cannot store unchanged")
    return text


def _unpack(text: bytes) -> Record:
    record = Record(*json.loads(text))
    return record._replace(
        turns=tuple([Message(*turn) for turn in record.turns]),
        messages=record.messages and tuple([Message(*turn) for turn in record.messages]),
        place=record.place and (record.place[0], record.place[1]),
    )


class Store:
    """Records in a temporary file that has no name, and ends with this process."""

    def __init__(self, parts: Iterable[PackedRecords], file: IO[bytes]) -> None:
        """Write the records of all ``parts`` to the empty ``file``."""
        file.write(b"\n")  # an empty file cannot be mapped
        sizes, facts = [np.ones(1, np.int64)], [np.empty(0, FACTS)]
        for part in parts:
            file.write(part.texts)
            sizes.append(part.sizes)
            facts.append(part.facts)
        file.flush()
        self._texts = mmap(file.fileno(), 0, access=ACCESS_READ)  # outlives ``file``
        self._texts.madvise(MADV_RANDOM)  # otherwise each text that is read maps 64 KiB around it
        self._ends = np.cumsum(np.concatenate(sizes))
        self.facts = np.concatenate(facts)

    def __len__(self) -> int:
        """Return the number of records."""
        return len(self.facts)

    def __getitem__(self, row: int) -> Record:
        """Return a record."""
        return _unpack(self._texts[self._ends[row] : self._ends[row + 1]])


class StoredRecords(Sequence[Record]):
    """Records selected from stores and lists, in any order."""

    def __init__(
        self, sources: Sequence[Store | Sequence[Record]], source_N: Numbers, row_N: Numbers
    ):
        """Select ``sources[source_N[i]][row_N[i]]`` as record ``i``."""
        self.sources, self.source_N, self.row_N = sources, source_N, row_N

    def __len__(self) -> int:
        """Return the number of records."""
        return len(self.row_N)

    @overload
    def __getitem__(self, index: int) -> Record: ...
    @overload
    def __getitem__(self, index: slice) -> list[Record]: ...
    def __getitem__(self, index: int | slice) -> Record | list[Record]:
        """Return a record, or a list of records."""
        if isinstance(index, slice):
            return [self[place] for place in range(*index.indices(len(self)))]
        source: Store | Sequence[Record] = self.sources[self.source_N[index]]
        return source[int(self.row_N[index])]


def is_in_memory(records: Sequence[Record]) -> bool:
    """Return True if ``records`` is a list; otherwise its records are read from files."""
    return isinstance(records, list)


def select_all(source: Store | Sequence[Record]) -> StoredRecords:
    """Return all records of a store or a list, in their order."""
    if isinstance(source, StoredRecords):
        return source
    size = len(source)
    return StoredRecords([source], np.zeros(size, np.uint16), np.arange(size, dtype=np.uint32))


def take(records: Sequence[Record], places: Sequence[int] | Numbers) -> Sequence[Record]:
    """Return the records at ``places``, in that order."""
    if is_in_memory(records):
        return [records[place] for place in places]
    whole = select_all(records)
    return StoredRecords(whole.sources, whole.source_N[places], whole.row_N[places])


def join(parts: Sequence[Sequence[Record]]) -> Sequence[Record]:
    """Return the records of all ``parts``, one after another."""
    if all(map(is_in_memory, parts)):
        return [record for part in parts for record in part]
    wholes = [select_all(part) for part in parts]
    firsts = np.cumsum([0, *(len(whole.sources) for whole in wholes)])
    return StoredRecords(
        [source for whole in wholes for source in whole.sources],
        np.concatenate([w.source_N + first for w, first in zip(wholes, firsts, strict=False)]),
        np.concatenate([whole.row_N for whole in wholes]),
    )


def facts_of(records: Store | Sequence[Record], name: str) -> Numbers:
    """Return the fact ``name`` of each record; it is computed now for records in memory."""
    if isinstance(records, Store):
        return records.facts[name]
    if not isinstance(records, StoredRecords):
        return np.array(FACT_FINDERS[name](records), FACTS[name])
    facts = np.empty(len(records), FACTS[name])
    for number, source in enumerate(records.sources):
        is_its = records.source_N == number
        facts[is_its] = facts_of(source, name)[records.row_N[is_its]]
    return facts


def number_groups(keys: Numbers) -> Numbers:
    """Return a number for each of ``keys``, by first appearance; equal keys get the same number."""
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


def mark_firsts(keys: Numbers) -> Numbers:
    """Return a mask that is True at each of ``keys`` that equals no earlier key."""
    numbers = number_groups(keys)
    is_first: Numbers = numbers > np.maximum.accumulate(np.concatenate([[-1], numbers]))[:-1]
    return is_first


def drop_repeated_examples(datasets: Sequence[RawDataset]) -> list[RawDataset]:
    """Return ``datasets`` without examples that occur earlier in the same or another dataset.

    Training and held-out examples are compared separately: ``divide_over_phases`` later removes
    training examples whose prompt is held out.
    """
    for side in ("train", "eval"):
        parts = [getattr(dataset, side) or [] for dataset in datasets]
        is_first = mark_firsts(np.concatenate([facts_of(part, "example_key") for part in parts]))
        marks = np.split(is_first, np.cumsum([*map(len, parts)])[:-1])
        datasets = [_keep(*each, side) for each in zip(datasets, marks, strict=True)]
    return list(datasets)


def _keep(dataset: RawDataset, is_kept: Numbers, side: str) -> RawDataset:
    """Return ``dataset`` with the records of a side that are kept; count the others as repeated."""
    repeats = np.flatnonzero(~is_kept)
    if not len(repeats):
        return dataset
    records = getattr(dataset, side)
    places = (records[int(row)].place for row in repeats[:MOST_PLACES])
    left_out = join_dropped([dataset.left_out])
    left_out.drop_all(REPEATED, len(repeats), list(filter(None, places)))
    kept: dict[str, Any] = {side: take(records, np.flatnonzero(is_kept))}
    return dataset._replace(**kept, left_out=left_out)
