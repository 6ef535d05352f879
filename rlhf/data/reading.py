"""Load the datasets that a configuration names, and describe each dataset in one line.

The rows of large files are converted in chunks and with several processes: this process reads the
chunks and stores the records; the others parse and convert. Records, their order and counts are
those of a conversion of all rows at once, whatever the number of processes.
"""

from __future__ import annotations

import os
import signal
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import fields, replace
from functools import partial
from itertools import chain
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryFile
from typing import NamedTuple, TypeVar

import numpy as np

from rlhf.base.errors import DataError
from rlhf.base.foreign_errors import translate_errors
from rlhf.base.supervisor import be_killed_after
from rlhf.base.user_paths import expand_user_path
from rlhf.config.choices import Phase, Source
from rlhf.config.schema.data import DatasetConfig
from rlhf.data.column_rules import (
    NONE_WANTED,
    Converted,
    Layout,
    Wanted,
    find_first_values,
    parse_columns,
)
from rlhf.data.detect import convert_rows, detect_layout, find_doubt, quote_for_hydra
from rlhf.data.files import Chunk
from rlhf.data.records import (
    Dropped,
    RawDataset,
    Record,
    Row,
    clean_records,
    describe_first_place,
    find_reversed_pairs,
    join_dropped,
)
from rlhf.data.stored import (
    PackedRecords,
    Store,
    drop_repeated_examples,
    facts_of,
    pack_records,
    select_all,
)
from rlhf.data.synthetic_pairs import add_right_answers, generate_records
from rlhf.data.tables import (
    Table,
    Tables,
    divide_tables_by_column,
    find_tables,
    join_first_names,
    rows_of,
    rows_of_chunk,
    translate_read_errors,
)
from rlhf.data.unread import Values
from rlhf.data.written_lists import read_written_messages
from rlhf.options import DataConfig

LARGE_BYTES = 2**25  # of text; the records of smaller data are kept in lists
MOST_PROCESSES = 8
MOST_WAITING = 2  # chunks per process that are read but whose records are not yet stored
T = TypeVar("T")


class _Settings(NamedTuple):
    """Settings for the conversion of a dataset."""

    keep: Wanted
    prepare: Callable[[Converted], Converted]
    """Cleans and changes the records, and counts those that it drops. It can be pickled."""
    folder: Path
    """The folder for the records of large files."""
    rules: Layout | None = None
    """The layout that data.sets gives; None: it is detected from the rows."""
    command: str = ""
    """The overrides that read the data set by the expressions COLUMNS."""


def load_datasets(
    config: DataConfig,
    *,
    seed: int,
    keep: Wanted = NONE_WANTED,
    change: Callable[[Record], Record] | None = None,
) -> list[RawDataset]:
    """Return every dataset that ``config`` names, in order; only generated data uses ``seed``.

    ``keep`` names columns that rewards or the reward model's loss read. A record gets a column only
    if its dataset is used by the phase that reads the column. ``change`` replaces each record.

    Raises:
        DataError: if data is missing, unreadable, malformed or without a usable row.
        ConfigError: if data.sets.NAME.columns is invalid.
    """
    prepare = partial(_prepare, is_cleaned=config.clean, change=change)
    folder = expand_user_path(config.cache_dir, key="data.cache_dir")
    datasets = _read_datasets(config, seed, _Settings(keep, prepare, folder))
    return drop_repeated_examples(datasets) if config.deduplicate else datasets


def _prepare(
    converted: Converted, *, is_cleaned: bool, change: Callable[[Record], Record] | None
) -> Converted:
    records = converted.records
    kept = clean_records(records, converted.left_out) if is_cleaned else records
    return converted._replace(records=kept if change is None else [change(each) for each in kept])


def _read_datasets(config: DataConfig, seed: int, settings: _Settings) -> list[RawDataset]:
    if config.source is Source.synthetic:
        records = add_right_answers(generate_records(config.size, seed=seed), settings.keep)
        made = settings.prepare(Converted(records, "preference", Dropped()))
        return [RawDataset("synthetic", made.records, None, made.layout, made.left_out)]
    if config.sets:
        return _read_blended_datasets(config, settings)
    paths = _list_data_paths(config.path, key="data.path")
    eval_paths: list[str] | list[None] = [None] * len(paths)
    if config.eval_path is not None:
        eval_paths = _list_data_paths(config.eval_path, key="data.eval_path")
    if len(eval_paths) != len(paths):
        raise DataError(
            f"data.eval_path has {len(eval_paths)} entries and data.path {len(paths)}: give one "
            "entry for each data.path entry, in the same order, or set data.eval_path=null to hold "
            "out a share of each data set."
        )
    pairs = zip(paths, eval_paths, strict=True)
    return [_load_dataset(path, eval_path, config, settings) for path, eval_path in pairs]


def _read_blended_datasets(config: DataConfig, settings: _Settings) -> list[RawDataset]:
    for key, value in (("data.path", config.path), ("data.eval_path", config.eval_path)):
        if value is not None:
            raise DataError(
                f"{key}={value} with data.sets ({', '.join(config.sets)}): set only one of "
                f"{key} and data.sets. For a copy of a set, use data.sets.NAME.path=FILE_OR_FOLDER."
            )
    rules = {  # check all rules before any download
        name: parse_columns(dataset.columns, key=f"data.sets.{name}.columns")
        for name, dataset in config.sets.items()
        if dataset.columns is not None
    }
    raw_datasets = []
    for name, dataset in config.sets.items():
        tables = find_tables(dataset, config.source, key=f"data.sets.{name}.path")
        wanted = {
            column: key
            for column, key in settings.keep.items()
            if (Phase.reward if key.startswith("reward.") else Phase.ppo)
            in (dataset.phases or Phase)
        }
        command = _build_command(config.source, name, dataset)
        changed = settings._replace(keep=wanted, rules=rules.get(name), command=command)
        raw = _convert_dataset(name, tables, changed)
        raw_datasets.append(raw._replace(weight=dataset.weight, phases=dataset.phases))
    return raw_datasets


def describe_dataset(dataset: RawDataset) -> str:
    """Return one line for the terminal: name, layout, examples, and dropped rows by reason."""
    own_eval = "" if dataset.eval is None else f" ({len(dataset.eval):,} held out)"
    sides = [dataset.train, dataset.eval or []]
    counts = np.concatenate([facts_of(side, "counts") for side in sides])
    has_pairs = counts["has_rejected"].any()
    without = ""
    for part in ("chosen", "rejected"):
        count = int((counts["has_prompt"] & ~counts[f"has_{part}"]).sum())
        part_name = part if has_pairs else "a response"
        without += f", {count:,} without {part_name}" if 0 < count < len(counts) else ""
    reverses = sum(1 for _ in find_reversed_pairs(chain(*sides))) if has_pairs else 0
    without += f", {reverses:,} the reverse of an earlier one" if reverses else ""
    examples = f"{len(counts):,} examples{own_eval}{without}"
    skipped = _describe_dropped_rows(dataset.left_out)
    talks = int((counts["answers"] > 0).sum())
    total, learned = int(counts["answers"].sum()), int(counts["learned"].sum())
    share = f"{learned:,}" if learned == total else f"{learned:,} of {total:,}"
    answers = f"learns {share} answers in {talks:,} conversations"
    notes = {
        f"{dataset.name}: {dataset.layout}, {examples}, {skipped}": True,
        answers: total > talks,
        f"reads {join_first_names(dataset.read)}": dataset.read,
        f"not read: {join_first_names(dataset.unread)}": dataset.unread,
        dataset.sides: dataset.sides,
        f"to check: {_list_counts(dataset.conflicts)}": dataset.conflicts,
    }
    return "; ".join(note for note, is_given in notes.items() if is_given)


def _describe_dropped_rows(left_out: Dropped) -> str:
    reasons = _list_counts(left_out)
    return f"{left_out.total():,} skipped" + (f" ({reasons})" if reasons else "")


def _list_counts(rows: Dropped) -> str:
    return ", ".join(
        f"{count:,} {reason}{describe_first_place(rows.places.get(reason))}"
        for reason, count in rows.most_common()
        if count
    )


def _list_data_paths(value: object, *, key: str) -> list[str]:
    entries = value if isinstance(value, list) else [value]
    texts = [entry for entry in entries if isinstance(entry, str) and entry]
    if not texts or len(texts) < len(entries):
        raise DataError(f"{key}={value}: must be a file, a folder, a hub id, or a list of them.")
    return texts


def _load_dataset(
    path: str, eval_path: str | None, config: DataConfig, settings: _Settings
) -> RawDataset:
    dataset = _describe_path(path, config)
    tables = find_tables(dataset, config.source, key="data.path")
    if eval_path is not None:
        if tables.eval:
            raise DataError(
                f"data.eval_path={eval_path}: data.path={path} already has held-out rows "
                f"({tables.eval[0].place}); set data.eval_path=null, or remove those rows."
            )
        held_out = replace(dataset, path=eval_path)
        others = find_tables(held_out, config.source, key="data.eval_path")
        tables = Tables(tables.train, others.eval or others.train, tables.sides)
    command = _build_command(config.source, "mine", dataset)
    return _convert_dataset(path, tables, settings._replace(command=command))


def _describe_path(path: str, config: DataConfig) -> DatasetConfig:
    return DatasetConfig(
        path=path,
        subset=config.subset,
        revision=config.revision,
        train_split=config.train_split,
        eval_split=config.eval_split,
    )


def list_datasets(config: DataConfig) -> list[DatasetConfig]:
    """Return the keys of each data set that ``config`` names."""
    places = {"data.path": config.path, "data.eval_path": config.eval_path}
    paths = [_list_data_paths(value, key=k) for k, value in places.items() if value is not None]
    return [*config.sets.values(), *(_describe_path(path, config) for path in chain(*paths))]


def _build_command(source: Source, name: str, dataset: DatasetConfig) -> str:
    """Return the overrides that read ``dataset`` by the expressions COLUMNS."""
    value_of_key = {field.name: getattr(dataset, field.name) for field in fields(dataset)}
    defaults = {"columns": None, "weight": 1.0, "train_split": "train"}
    entries = [
        f"{key}: {quote_for_hydra(str(value))}"
        for key, value in value_of_key.items()
        if value is not None and value != defaults.get(key) and not isinstance(value, list)
    ]
    entries += [f"phases: [{','.join(dataset.phases)}]"] if dataset.phases else []
    words = f"data={source} data.path=null"
    return f"{words} data.sets.{name}={{{', '.join(entries)}, columns: COLUMNS}}"


def _convert_dataset(name: str, tables: Tables, settings: _Settings) -> RawDataset:
    tables = divide_tables_by_column(tables)
    sides = [side for side in (tables.train, tables.eval) if side]
    converted = [_convert_tables(side, settings) for side in sides]
    joined = join_counts(converted)
    return RawDataset(
        name,
        converted[0].records,
        converted[1].records if tables.eval else None,
        joined.layout,
        joined.left_out,
        read=joined.read,
        unread=tuple(joined.unread),
        sides=tables.sides,
        varied={name: str(values) for name, values in joined.unread.items() if values.varies},
        conflicts=joined.conflicts,
    )


def _convert_tables(tables: list[Table], settings: _Settings) -> Converted:
    """Return the usable records of ``tables``, with the counts and columns of all their rows."""
    is_large = sum(table.bytes for table in tables) > LARGE_BYTES
    converted = store_tables(tables, settings) if is_large else None
    if converted is None:
        keep, rules, command = settings.keep, settings.rules, settings.command
        parts = [
            convert_rows(rows_of(each), source=each.place, keep=keep, rules=rules, command=command)
            for each in tables
        ]
        records = [record for part in parts for record in part.records]
        converted = settings.prepare(join_counts(parts)._replace(records=records))
    if not len(converted.records):
        places = ", ".join(table.place for table in tables)
        reasons = _describe_dropped_rows(converted.left_out)
        raise DataError(f"{places}: no row can be used: {reasons}.")
    return converted


class NotAloneError(Exception):
    """The error for a chunk that cannot be converted without the other rows."""


def store_tables(tables: Sequence[Table], settings: _Settings) -> Converted | None:
    """Convert all rows of ``tables``; return the records and the counts of all chunks.

    The records are stored in a file without a name in ``settings.folder``. Return None if all rows
    must be converted at once: a column has values, but none in the first chunk; responses of
    several rows are compared; a chunk is refused, although all rows together may be accepted; or an
    unread column may change what is learned.

    Raises:
        DataError: if a table cannot be read.
    """
    with translate_errors(
        lambda reason: DataError(
            f"data.cache_dir={settings.folder} cannot be used ({reason}): choose another folder "
            "with data.cache_dir=FOLDER, or RLHF_CACHE in the environment"
        )
    ):
        settings.folder.mkdir(parents=True, exist_ok=True)
        opened = TemporaryFile(dir=settings.folder)  # noqa: SIM115
    counts: list[Converted] = []
    layouts: list[Layout] = []

    def convert_chunks() -> Iterator[PackedRecords]:
        tasks = _list_tasks(tables, settings, layouts)
        for packed, converted in run_in_order(tasks, count_processes()):
            counts.append(converted)
            yield packed

    try:
        with opened as file:
            records = select_all(Store(convert_chunks(), file))
    except NotAloneError:
        return None
    joined = join_counts(counts)._replace(records=records)
    is_doubtful = any(find_doubt(layout, joined.unread)[0] for layout in layouts)
    return None if is_doubtful else joined


def join_counts(parts: Sequence[Converted]) -> Converted:
    """Return layouts, counts and columns of all ``parts``, without their records."""
    unread: dict[str, Values] = {}
    for name, values in (item for part in parts for item in part.unread.items()):
        unread[name] = unread[name].join(values) if name in unread else values
    return Converted(
        [],
        " + ".join(dict.fromkeys(part.layout for part in parts)),
        join_dropped(part.left_out for part in parts),
        tuple(dict.fromkeys(name for part in parts for name in part.read)),
        unread,
        join_dropped(part.conflicts for part in parts),
    )


def _list_tasks(
    tables: Sequence[Table], settings: _Settings, layouts: list[Layout]
) -> Iterator[Callable[[], tuple[PackedRecords, Converted]]]:
    """Yield for each chunk a function that converts it by the layout of its table's first chunk.

    The layout of each table is added to ``layouts``.
    """
    for table in tables:
        layout = None
        with translate_read_errors(table.place):
            for chunk in table.read_chunks():
                if layout is None:
                    first, layout = _read_first_chunk(chunk, table, settings)
                    layouts.append(layout)
                yield partial(_convert_chunk, chunk, table.place, layout, first, settings)
        if layout is None:
            raise NotAloneError


def _read_first_chunk(
    chunk: Chunk, table: Table, settings: _Settings
) -> tuple[dict[str, object], Layout]:
    """Return the first values of a table's columns, and its layout."""
    try:
        rows = read_written_messages(list(rows_of_chunk(chunk, table.place)))
        layout = settings.rules or detect_layout(rows, source=table.place, keep=settings.keep)
    except DataError as error:
        raise NotAloneError from error
    if "threads" in layout.expressions:
        raise NotAloneError
    return find_first_values(rows), layout


def _convert_chunk(
    chunk: Chunk, place: str, layout: Layout, first: dict[str, object], settings: _Settings
) -> tuple[PackedRecords, Converted]:
    """Return the records of a chunk, packed, and its ``Converted`` without them."""
    with translate_read_errors(place):
        rows: Sequence[Row] = list(rows_of_chunk(chunk, place))
    try:
        rows = read_written_messages(rows)
        if not _is_alike(find_first_values(rows), first):
            raise NotAloneError
        converted = layout.convert(rows, source=place, keep=settings.keep)
        if any(isinstance(record.grade, float) for record in converted.records):
            raise NotAloneError  # a score may have rivals in other chunks
        converted = settings.prepare(converted)
        return pack_records(converted.records), converted._replace(records=[])
    except (DataError, TypeError) as error:
        raise NotAloneError from error


def _is_alike(values: dict[str, object], first: dict[str, object]) -> bool:
    """Return True if the first ``values`` of a chunk fit ``first``, those of the first chunk.

    Each column must be in ``first``: with a value if the chunk has one, and both lists or neither.
    """
    has_all = all(
        name in first and (value is None or first[name] is not None)
        for name, value in values.items()
    )
    given = [(value, first[name]) for name, value in values.items() if has_all and value]
    return has_all and all(isinstance(a, list) == isinstance(b, list) for a, b in given)


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
            if len(waiting) > MOST_WAITING * processes:
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
    """Yield the future of each task; an error that ``tasks`` raises becomes one more future."""
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
