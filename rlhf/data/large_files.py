"""Convert the rows of large files to stored records, in chunks and with several processes.

Each process reads the whole file, and parses and converts its own chunks. Records, their order and
counts are those of a conversion of all rows at once, whatever the number of processes.
"""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any, NamedTuple, TypeVar
from weakref import finalize

import numpy as np

from rlhf.base.errors import DataError
from rlhf.base.foreign_errors import translate_errors
from rlhf.data.column_rules import Converted, Layout, Wanted, find_first_values
from rlhf.data.records import Record, Row
from rlhf.data.stored import Numbers, StoredRecords, write_records
from rlhf.data.tables import Table, rows_of_chunk, translate_read_errors

LARGE = 2**25  # bytes of text; the records of smaller data are kept in lists
MOST_PROCESSES = 8
MARKS = {"grade", "rank"}  # targets that compare the responses of several rows
FIRST = " (first: "  # begins the place of the first of several rows, at the end of a reason

T = TypeVar("T")


class Conversion(NamedTuple):
    """How rows become the records of a run."""

    find_layout: Callable[[Sequence[Row], str], Layout]
    """Returns the layout of the rows of a source."""
    keep: Wanted
    prepare: Callable[[Sequence[Record], Counter[str]], list[Record]]
    """Returns the records to use, cleaned; counts the others by reason."""


class StoredChunk(NamedTuple):
    """What one chunk of a table became; ``number`` counts the chunks of all tables."""

    number: int
    counts: Converted
    """The result of the conversion, without its records."""
    dropped: Counter[str]
    """The numbers of records that ``Conversion.prepare`` dropped, by reason."""
    facts: Numbers


class FailedChunk(NamedTuple):
    """Why chunk ``number`` was not converted; the error is None if it cannot be alone."""

    number: int
    error: DataError | None


def is_large(tables: Sequence[Table]) -> bool:
    """Return True if the records of ``tables`` need too much memory for a list."""
    return sum(table.bytes for table in tables) > LARGE


def store_tables(
    tables: Sequence[Table], conversion: Conversion, *, folder: Path
) -> tuple[Converted, Counter[str]] | None:
    """Convert all rows of ``tables``; return records, counts, and the counts of ``prepare``.

    The records are stored in files without a name in ``folder``. Return None if the rows must be
    converted at once: a column has no value in the first chunk, or responses of several rows are
    compared, or a chunk is refused, while all rows may be accepted.

    Raises:
        DataError: if a table cannot be read.
    """
    processes = count_processes()
    with ExitStack() as stack:
        with translate_errors(
            lambda reason: DataError(
                f"data.cache_dir={folder} cannot be used ({reason}): choose another folder "
                "with data.cache_dir=FOLDER, or RLHF_CACHE in the environment"
            )
        ):
            folder.mkdir(parents=True, exist_ok=True)
            files = [stack.enter_context(TemporaryFile(dir=folder)) for _ in range(processes)]

        def store_own(own: int) -> tuple[list[StoredChunk], FailedChunk | None]:
            return _ChunkStore(conversion, files[own], own, processes).store(tables)

        results = run_in_processes(store_own, processes)
        failures = [failure for _, failure in results if failure is not None]
        if failures:
            first = min(failures, key=lambda failure: failure.number)
            if first.error is not None:
                raise first.error
            return None
        chunks = sorted((chunk for found, _ in results for chunk in found), key=lambda c: c.number)
        records = StoredRecords(files, np.concatenate([chunk.facts for chunk in chunks]))
        finalize(records, stack.pop_all().close)
    converted = join_counts([chunk.counts for chunk in chunks])._replace(records=records)
    return converted, sum((chunk.dropped for chunk in chunks), Counter[str]())


def join_counts(parts: Sequence[Converted]) -> Converted:
    """Return layouts, counts and columns of all ``parts``, without their records."""
    left_out: Counter[str] = Counter()
    reasons: dict[str, str] = {}
    for part in parts:
        for reason, count in part.left_out.items():
            left_out[reasons.setdefault(reason.partition(FIRST)[0], reason)] += count
    return Converted(
        [],
        " + ".join(dict.fromkeys(part.layout for part in parts)),
        left_out,
        tuple(dict.fromkeys(name for part in parts for name in part.read)),
        tuple(dict.fromkeys(name for part in parts for name in part.unread)),
    )


class _ChunkStore:
    """The chunks of one process: every ``processes``-th chunk, from chunk ``own``."""

    def __init__(self, conversion: Conversion, file: IO[bytes], own: int, processes: int) -> None:
        self._conversion, self._file = conversion, file
        self._own, self._processes = own, processes
        self._chunks: list[StoredChunk] = []
        self._number = 0

    def store(self, tables: Sequence[Table]) -> tuple[list[StoredChunk], FailedChunk | None]:
        """Convert and store the chunks, up to the first that fails."""
        try:
            is_done = all(self._store_table(table) for table in tables)
        except DataError as error:
            return self._chunks, FailedChunk(self._number, error)
        self._file.flush()
        return self._chunks, None if is_done else FailedChunk(self._number, None)

    def _store_table(self, table: Table) -> bool:
        """Store the chunks of a table; return False if a chunk cannot be converted alone."""
        layout = None
        with translate_read_errors(table):
            for chunk in table.read_chunks():
                is_own = self._number % self._processes == self._own
                if layout is None or is_own:
                    rows = list(rows_of_chunk(table, chunk))
                    values = find_first_values(rows)
                    if layout is None:
                        first = values
                        layout = self._find_layout(rows, table)
                    if layout is None or not _is_alike(values, first):
                        return False
                    if is_own and not self._store_chunk(rows, layout, table):
                        return False
                self._number += 1
        return layout is not None

    def _find_layout(self, rows: Sequence[Row], table: Table) -> Layout | None:
        try:
            layout = self._conversion.find_layout(rows, table.place)
        except DataError:
            return None
        return None if "threads" in layout.expressions else layout

    def _store_chunk(self, rows: Sequence[Row], layout: Layout, table: Table) -> bool:
        try:
            found = layout.convert(rows, source=table.place, keep=self._conversion.keep)
        except DataError:
            return False
        if MARKS & layout.expressions.keys() and not all(map(_is_marked, found.records)):
            return False
        dropped: Counter[str] = Counter()
        kept = self._conversion.prepare(found.records, dropped)
        try:
            facts = write_records(kept, self._file, self._own)
        except TypeError:
            return False
        self._chunks.append(StoredChunk(self._number, found._replace(records=[]), dropped, facts))
        return True


def _is_marked(record: Record) -> bool:
    """Return True if a record has a mark; a score may have rivals in other chunks."""
    return isinstance(record.grade, bool) and record.rejected is None


def _is_alike(values: dict[str, object], first: dict[str, object]) -> bool:
    """Return True if ``first``, of the first chunk, has each column, with a value if this has."""
    return all(
        name in first and (value is None or first[name] is not None)
        for name, value in values.items()
    )


def count_processes() -> int:
    """Return the number of processes that convert rows: this rank's share of the cores."""
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return min(MOST_PROCESSES, max(1, len(os.sched_getaffinity(0)) // ranks))


def run_in_processes(work: Callable[[int], T], processes: int) -> list[T]:
    """Return ``work(0)``, ``work(1)``, ..., each from a copy of this process.

    Raises:
        DataError: if a process ends without a result.
    """
    if processes == 1:
        return [work(0)]
    context = get_context("fork")  # the copies share what was read and imported
    started = []
    try:
        for number in range(processes):
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(target=_send_result, args=(work, number, sender), daemon=True)
            process.start()
            started.append((process, receiver))
            sender.close()
        return [_receive_result(receiver) for _, receiver in started]
    finally:
        for process, receiver in started:
            process.terminate()
            process.join()
            process.close()
            receiver.close()


def _send_result(work: Callable[[int], T], number: int, sender: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends its copies
    try:
        sender.send((work(number), None))
    except Exception as error:
        sender.send((None, error))


def _receive_result(receiver: Connection) -> Any:
    try:
        result, error = receiver.recv()
    except EOFError as error:
        raise DataError(
            "a process that read data ended early; another program may have ended it, or memory "
            "may have run out"
        ) from error
    if error is not None:
        raise error
    return result
