"""Sequences of records that are no lists: records in a temporary file, and selections of others.

A list of two million records needs over 3 GB. ``StoredRecords`` keeps records in an Arrow file, and
in memory only fixed-size ``FACTS``, by which a data set is cleaned of repeats and divided.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from mmap import ACCESS_READ, MADV_RANDOM, mmap
from operator import itemgetter
from typing import IO, TYPE_CHECKING, Any, NamedTuple, overload
from unicodedata import is_normalized

import numpy as np

from rlhf.data.records import (
    FIRST_PLACES,
    SPEAKERS,
    TEXT_FIELDS,
    Dropped,
    Message,
    RawDataset,
    Record,
    example_key,
    join_dropped,
    prompt_key,
)

if TYPE_CHECKING:
    from pyarrow import RecordBatch, Schema  # type: ignore[import-untyped]

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
        ("prompt_key", KEY),  # of the prompt, or of the text if there is no prompt
        ("example_key", KEY),  # of all texts
        ("prompt_bytes", np.uint32),  # UTF-8 bytes of the prompt
        ("answer_bytes", np.uint32),  # UTF-8 bytes of the response, or of the text
        ("has_text", np.bool_),
        ("is_plain", np.bool_),  # True if its texts are in NFC, and plain turns show all of it
    ]
)
# Fields that must have their defaults in a record whose texts are all that is learned of it.
MORE = ("seed", "turns", "tools", "grade")
read_more = itemgetter(*map(Record._fields.index, MORE))
NO_MORE = read_more(Record())
MAY_BE_SPECIAL = re.compile(r"<[|/\w\uff5c]|\[[A-Z]")  # how names of special tokens begin
# Fields that few records have beside their texts and place; they are stored as JSON.
REST = ("columns", "turns", "messages", "tools", "seed", "grade")
read_rest = itemgetter(*map(Record._fields.index, REST))
NO_REST = read_rest(Record())
PACK = json.JSONEncoder(check_circular=False, separators=(",", ":")).encode


def _count_parts(record: Record) -> tuple[bool, bool, bool, int, int]:
    prompt, chosen, rejected, _ = record.texts
    is_talk = record.messages is not None and chosen is not None
    answers = (record.num_answers, record.num_learned_answers) if is_talk else (0, 0)
    return prompt is not None, chosen is not None, rejected is not None, *answers


def _join_keys(keys: Iterable[bytes]) -> Numbers:
    return np.array(bytearray(b"".join(keys)), np.uint8).view(KEY)


def _count_bytes(text: str | None) -> int:
    if text is None:
        return 0
    return len(text) if text.isascii() else len(text.encode(errors="surrogatepass"))


def _is_plain(record: Record) -> bool:
    return (
        read_more(record) == NO_MORE
        and all([t is None or t.isascii() or is_normalized("NFC", t) for t in record.texts])
        and (record.messages is None or _is_shown_whole(record.messages, record.texts))
    )


def _is_shown_whole(messages: Sequence[Message], texts: Sequence[str | None]) -> bool:
    return all(each.more is None and each.role in SPEAKERS for each in messages) and not (
        messages and any(MAY_BE_SPECIAL.search(text) for text in texts if text)
    )


FIND_FACT: dict[str, Callable[[Sequence[Record]], Any]] = {
    "counts": lambda records: [_count_parts(each) for each in records],
    "prompt_key": lambda records: _join_keys(map(prompt_key, records)),
    "example_key": lambda records: _join_keys(map(example_key, records)),
    "prompt_bytes": lambda records: [_count_bytes(each.prompt) for each in records],
    "answer_bytes": lambda records: [
        _count_bytes(each.chosen if each.text is None else each.text) for each in records
    ],
    "has_text": lambda records: [each.text is not None for each in records],
    "is_plain": lambda records: [_is_plain(each) for each in records],
}


class PackedRecords(NamedTuple):
    """Some records as a record batch of Arrow, and their ``FACTS``."""

    batch: RecordBatch
    facts: Numbers


def pack_records(records: Sequence[Record]) -> PackedRecords:
    """Return ``records`` as a record batch, with their facts.

    Raises:
        TypeError: if a value, such as a date in a column of rewards, changes as JSON.
        UnicodeEncodeError: if a text has a lone surrogate.
    """
    import pyarrow

    places = [each.place or (None, None) for each in records]
    columns = {name: [getattr(each, name) for each in records] for name in TEXT_FIELDS} | {
        "file": [file for file, _ in places],
        "row": [row for _, row in places],
        "rest": [_pack_rest(each) for each in records],
    }
    facts = np.empty(len(records), FACTS)
    for name, find in FIND_FACT.items():
        facts[name] = find(records)
    return PackedRecords(pyarrow.record_batch(columns, _build_schema()), facts)


def _build_schema() -> Schema:
    import pyarrow

    text = pyarrow.large_string()
    types = {name: text for name in TEXT_FIELDS}
    return pyarrow.schema(types | {"file": text, "row": pyarrow.int64(), "rest": text})


def _pack_rest(record: Record) -> str | None:
    rest = read_rest(record)
    if rest == NO_REST:
        return None
    packed = PACK(rest)
    has_values = record.columns or record.tools or any([each.more for each in record.turns])
    if has_values and tuple(_unpack_rest(packed).values()) != rest:
        raise TypeError("a value of a column changes as JSON")
    return packed


def _unpack_rest(packed: str) -> dict[str, Any]:
    rest = dict(zip(REST, json.loads(packed), strict=True))
    for name in ("turns", "messages"):
        rest[name] = rest[name] and tuple([Message(*each) for each in rest[name]])
    return rest | {"turns": rest["turns"] or ()}


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
    """Records in a temporary file that has no name, and ends with this process."""

    def __init__(self, parts: Iterable[PackedRecords], file: IO[bytes]) -> None:
        """Write the records of all ``parts`` to the empty ``file``, and map it into memory."""
        from pyarrow import ipc, py_buffer

        found = [np.empty(0, FACTS)]
        with ipc.new_stream(file, _build_schema()) as writer:
            for batch, facts in parts:
                writer.write_batch(batch)
                found.append(facts)
        file.flush()
        mapped = mmap(file.fileno(), 0, access=ACCESS_READ)  # outlives ``file``
        mapped.madvise(MADV_RANDOM)  # or each text that is read maps 64 KiB around it
        self._columns = ipc.open_stream(py_buffer(mapped)).read_all().columns
        self.facts = np.concatenate(found)

    def __len__(self) -> int:
        """Return the number of records."""
        return len(self.facts)

    def _read(self, index: int) -> Record:
        values = [column[int(index)].as_py() for column in self._columns]
        prompt, chosen, rejected, text, file, row, rest = values
        place = None if file is None else (file, row)
        more = {} if rest is None else _unpack_rest(rest)
        return Record(prompt, chosen, rejected, text, place=place, **more)


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


def facts_of(records: Sequence[Record], name: str) -> Numbers:
    """Return the fact ``name`` of each record; it is computed now for records in memory."""
    if isinstance(records, StoredRecords):
        return np.array(records.facts[name])
    if not isinstance(records, Selection):
        return np.array(FIND_FACT[name](records), FACTS[name])
    found = np.empty(len(records), FACTS[name])
    for number, source in enumerate(records.sources):
        own = records.source_N == number
        found[own] = facts_of(source, name)[records.row_N[own]]
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
    for each, (kept, dropped), (kept_eval, more) in zip(datasets, train, held_out, strict=True):
        left_out = join_dropped([each.left_out, dropped, more])
        own_eval = None if each.eval is None else kept_eval
        found.append(each._replace(train=kept, eval=own_eval, left_out=left_out))
    return found


def _drop_repeated(parts: Sequence[Sequence[Record]]) -> list[tuple[Sequence[Record], Dropped]]:
    """Return for each part the records that do not repeat an earlier one, and those that do."""
    keys = np.concatenate([facts_of(part, "example_key") for part in parts])
    is_first = first_of_groups(number_groups(keys))
    ends = np.cumsum([0, *map(len, parts)])
    found = []
    for part, (start, end) in zip(parts, pairwise(ends), strict=True):
        repeats = np.flatnonzero(~is_first[start:end])
        places = (part[int(row)].place for row in repeats[:FIRST_PLACES])
        dropped = Dropped()
        if len(repeats):
            dropped.drop_all(REPEATED, len(repeats), list(filter(None, places)))
        found.append((take(part, np.flatnonzero(is_first[start:end])), dropped))
    return found
