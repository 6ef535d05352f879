"""Convert the rows of large files to stored records, in chunks and with several processes.

This process reads the chunks and writes the records; the others parse and convert. Records, their
order and counts are those of a conversion of all rows at once, whatever the number of processes.
"""

from __future__ import annotations

import os
import signal
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryFile
from typing import NamedTuple, TypeVar

from rlhf.base.errors import DataError
from rlhf.base.foreign_errors import translate_errors
from rlhf.base.supervisor import be_killed_after
from rlhf.data.column_rules import Converted, Layout, Wanted, find_first_values
from rlhf.data.files import Chunk
from rlhf.data.records import Dropped, Record, Row, join_dropped
from rlhf.data.stored import PackedRecords, StoredRecords, pack_records
from rlhf.data.tables import Table, rows_of_chunk, translate_read_errors

LARGE = 2**25  # bytes of text; the records of smaller data are kept in lists
MOST_PROCESSES = 8
WAITING = 2  # chunks per process that are read ahead, or converted and not yet stored
MARKS = {"grade", "rank"}  # targets that compare the responses of several rows

T = TypeVar("T")


class Conversion(NamedTuple):
    """How rows become the records of a run."""

    find_layout: Callable[[Sequence[Row], str], Layout]
    """Returns the layout of the rows of a source."""
    keep: Wanted
    prepare: Callable[[Sequence[Record], Dropped], list[Record]]
    """Returns the records to use, cleaned; counts the others by reason. It can be pickled."""


class ConvertedChunk(NamedTuple):
    """The result of the conversion of one chunk."""

    packed: PackedRecords
    counts: Converted
    """The result of the conversion, without its records."""
    dropped: Dropped
    """The records that ``Conversion.prepare`` dropped, by reason."""


class NotAloneError(Exception):
    """The error for a chunk that cannot be converted without the other rows."""


def is_large(tables: Sequence[Table]) -> bool:
    """Return True if the records of ``tables`` need too much memory for a list."""
    return sum(table.bytes for table in tables) > LARGE


def store_tables(
    tables: Sequence[Table], conversion: Conversion, *, folder: Path
) -> tuple[Converted, Dropped] | None:
    """Convert all rows of ``tables``; return records, counts, and the counts of ``prepare``.

    The records are stored in a file without a name in ``folder``. Return None if the rows must be
    converted at once: a column has no value in the first chunk, or responses of several rows are
    compared, or a chunk is refused, while all rows may be accepted.

    Raises:
        DataError: if a table cannot be read.
    """
    with translate_errors(
        lambda reason: DataError(
            f"data.cache_dir={folder} cannot be used ({reason}): choose another folder "
            "with data.cache_dir=FOLDER, or RLHF_CACHE in the environment"
        )
    ):
        folder.mkdir(parents=True, exist_ok=True)
        opened = TemporaryFile(dir=folder)  # noqa: SIM115
    counts: list[Converted] = []
    dropped: list[Dropped] = []

    def convert_chunks() -> Iterator[PackedRecords]:
        for chunk in run_in_order(_list_tasks(tables, conversion), count_processes()):
            counts.append(chunk.counts)
            dropped.append(chunk.dropped)
            yield chunk.packed

    try:
        with opened as file:
            records = StoredRecords(convert_chunks(), file)
    except NotAloneError:
        return None
    return join_counts(counts)._replace(records=records), join_dropped(dropped)


def join_counts(parts: Sequence[Converted]) -> Converted:
    """Return layouts, counts and columns of all ``parts``, without their records."""
    return Converted(
        [],
        " + ".join(dict.fromkeys(part.layout for part in parts)),
        join_dropped(part.left_out for part in parts),
        tuple(dict.fromkeys(name for part in parts for name in part.read)),
        tuple(dict.fromkeys(name for part in parts for name in part.unread)),
    )


def _list_tasks(
    tables: Sequence[Table], conversion: Conversion
) -> Iterator[Callable[[], ConvertedChunk]]:
    """Yield a function for each chunk, which converts it by the layout of its table's first."""
    keep, prepare = conversion.keep, conversion.prepare
    for table in tables:
        layout = None
        with translate_read_errors(table.place):
            for chunk in table.read_chunks():
                if layout is None:
                    rows = list(rows_of_chunk(chunk, table.place))
                    first = find_first_values(rows)
                    layout = _find_layout(rows, table, conversion)
                yield partial(_convert_chunk, chunk, table.place, layout, first, keep, prepare)
        if layout is None:
            raise NotAloneError


def _find_layout(rows: Sequence[Row], table: Table, conversion: Conversion) -> Layout:
    try:
        layout = conversion.find_layout(rows, table.place)
    except DataError as error:
        raise NotAloneError from error
    if "threads" in layout.expressions:
        raise NotAloneError
    return layout


def _convert_chunk(
    chunk: Chunk,
    place: str,
    layout: Layout,
    first: dict[str, object],
    keep: Wanted,
    prepare: Callable[[Sequence[Record], Dropped], list[Record]],
) -> ConvertedChunk:
    with translate_read_errors(place):
        rows = list(rows_of_chunk(chunk, place))
    if not _is_alike(find_first_values(rows), first):
        raise NotAloneError
    try:
        found = layout.convert(rows, source=place, keep=keep)
        if MARKS & layout.expressions.keys() and not all(map(_is_marked, found.records)):
            raise NotAloneError
        dropped = Dropped()
        packed = pack_records(prepare(found.records, dropped))
    except (DataError, TypeError, UnicodeEncodeError) as error:
        raise NotAloneError from error
    return ConvertedChunk(packed, found._replace(records=[]), dropped)


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


def run_in_order(tasks: Iterable[Callable[[], T]], processes: int) -> Iterator[T]:
    """Yield the results of ``tasks`` in their order; several processes run them.

    Raises:
        DataError: if a process ends before its task.
        Exception: the error of the first task that fails.
    """
    if processes == 1:
        yield from (task() for task in tasks)
        return
    context = get_context("fork")  # the processes share what was imported
    pool = ProcessPoolExecutor(processes, context, _end_with_parent, (os.getpid(),))
    waiting: deque[Future[T]] = deque()
    try:
        for future in _submit_all(tasks, pool):
            waiting.append(future)
            if len(waiting) > WAITING * processes:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    except BrokenProcessPool as error:
        raise DataError(
            "a process that read data ended early; another program may have ended it, or memory "
            "may have run out"
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


def _submit_all(tasks: Iterable[Callable[[], T]], pool: ProcessPoolExecutor) -> Iterator[Future[T]]:
    """Yield the future of each task; if ``tasks`` raises an error, it is that of the last."""
    try:
        for task in tasks:
            yield pool.submit(task)
    except Exception as error:
        failed: Future[T] = Future()
        failed.set_exception(error)
        yield failed


def _end_with_parent(parent: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends its processes
    if be_killed_after(parent):
        os._exit(1)
