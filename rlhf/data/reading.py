"""Load the datasets that a configuration names, and describe each dataset in one line."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import numpy as np

from rlhf.base.errors import DataError
from rlhf.base.user_paths import expand_user_path
from rlhf.config.choices import Phase, Source
from rlhf.config.schema.data import DatasetConfig
from rlhf.data.column_rules import NONE_WANTED, Converted, Layout, Wanted, parse_columns
from rlhf.data.detect import detect_layout
from rlhf.data.large_files import Conversion, is_large, join_counts, store_tables
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
from rlhf.data.stored import drop_repeated_examples, facts_of
from rlhf.data.synthetic_pairs import add_right_answers, generate_records
from rlhf.data.tables import Table, Tables, find_tables, join_first_names, rows_of
from rlhf.options import DataConfig


class _Settings(NamedTuple):
    """What applies to every dataset of a run."""

    keep: Wanted
    prepare: Callable[[Sequence[Record], Dropped], list[Record]]
    """Returns the records to use, cleaned; counts the others by reason."""
    folder: Path
    """The folder for the records of large files."""


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
    records: Sequence[Record],
    left_out: Dropped,
    *,
    is_cleaned: bool,
    change: Callable[[Record], Record] | None,
) -> list[Record]:
    kept = clean_records(records, left_out) if is_cleaned else list(records)
    return kept if change is None else [change(record) for record in kept]


def _read_datasets(config: DataConfig, seed: int, settings: _Settings) -> list[RawDataset]:
    if config.source is Source.synthetic:
        records = add_right_answers(generate_records(config.size, seed=seed), settings.keep)
        left_out = Dropped()
        prepared = settings.prepare(records, left_out)
        return [RawDataset("synthetic", prepared, None, "preference", left_out)]
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
    read = []
    for name, dataset in config.sets.items():
        tables = find_tables(dataset, config.source, key=f"data.sets.{name}.path")
        wanted = {
            column: key
            for column, key in settings.keep.items()
            if _find_reading_phase(key) in (dataset.phases or Phase)
        }
        raw = _convert_dataset(name, tables, rules.get(name), settings._replace(keep=wanted))
        read.append(raw._replace(weight=dataset.weight, phases=dataset.phases))
    return read


def _find_reading_phase(key: str) -> Phase:
    """Return the phase that reads the data column which the config key ``key`` names."""
    return Phase.reward if key.startswith("reward.") else Phase.ppo


def describe_dataset(dataset: RawDataset) -> str:
    """Return one line for the terminal: name, layout, examples, and dropped rows by reason."""
    own_eval = "" if dataset.eval is None else f" ({len(dataset.eval):,} held out)"
    sides = [dataset.train, dataset.eval or []]
    counts = np.concatenate([facts_of(side, "counts") for side in sides])
    has_pairs = counts["has_rejected"].any()
    without = ""
    for part in ("chosen", "rejected"):
        count = int((counts["has_prompt"] & ~counts[f"has_{part}"]).sum())
        what = part if has_pairs else "a response"
        without += f", {count:,} without {what}" if 0 < count < len(counts) else ""
    reverses = sum(1 for _ in find_reversed_pairs(chain(*sides))) if has_pairs else 0
    without += f", {reverses:,} the reverse of an earlier one" if reverses else ""
    examples = f"{len(counts):,} examples{own_eval}{without}"
    skipped = _describe_dropped_rows(dataset.left_out)
    talks = int((counts["answers"] > 0).sum())
    total, learned = int(counts["answers"].sum()), int(counts["learned"].sum())
    share = f"{learned:,}" if learned == total else f"{learned:,} of {total:,}"
    answers = f"learns {share} answers of {talks:,} conversations"
    notes = {
        f"{dataset.name}: {dataset.layout}, {examples}, {skipped}": True,
        answers: total > talks,
        f"reads {join_first_names(dataset.read)}": dataset.read,
        f"not read: {join_first_names(dataset.unread)}": dataset.unread,
        dataset.sides: dataset.sides,
    }
    return "; ".join(note for note, is_given in notes.items() if is_given)


def _describe_dropped_rows(left_out: Dropped) -> str:
    reasons = ", ".join(
        f"{count:,} {reason}{describe_first_place(left_out.places.get(reason))}"
        for reason, count in left_out.most_common()
        if count
    )
    return f"{left_out.total():,} skipped" + (f" ({reasons})" if reasons else "")


def _list_data_paths(value: object, *, key: str) -> list[str]:
    entries = value if isinstance(value, list) else [value]
    texts = [entry for entry in entries if isinstance(entry, str) and entry]
    if not texts or len(texts) < len(entries):
        raise DataError(f"{key}={value}: must be a file, a folder, a hub id, or a list of them.")
    return texts


def _load_dataset(
    path: str, eval_path: str | None, config: DataConfig, settings: _Settings
) -> RawDataset:
    given = DatasetConfig(
        path=path,
        subset=config.subset,
        revision=config.revision,
        train_split=config.train_split,
        eval_split=config.eval_split,
    )
    tables = find_tables(given, config.source, key="data.path")
    if eval_path is not None:
        if tables.eval:
            raise DataError(
                f"data.eval_path={eval_path}: data.path={path} already has held-out rows "
                f"({tables.eval[0].place}); set data.eval_path=null, or remove those rows."
            )
        given.path = eval_path
        others = find_tables(given, config.source, key="data.eval_path")
        tables = Tables(tables.train, others.eval or others.train, tables.sides)
    return _convert_dataset(path, tables, None, settings)


def _convert_dataset(
    name: str, tables: Tables, rules: Layout | None, settings: _Settings
) -> RawDataset:
    sides = [side for side in (tables.train, tables.eval) if side]
    found = [_convert_tables(side, rules, settings) for side in sides]
    both = join_counts([converted for converted, _ in found])
    records = [converted.records for converted, _ in found]
    return RawDataset(
        name,
        records[0],
        records[1] if tables.eval else None,
        both.layout,
        join_dropped([both.left_out, *(dropped for _, dropped in found)]),
        read=both.read,
        unread=both.unread,
        sides=tables.sides,
    )


def _convert_tables(
    tables: list[Table], rules: Layout | None, settings: _Settings
) -> tuple[Converted, Dropped]:
    """Return the records of ``tables``, and the numbers of those that ``prepare`` dropped."""
    keep, prepare = settings.keep, settings.prepare

    def find_layout(rows: Sequence[Row], source: str) -> Layout:
        return rules or detect_layout(rows, source=source, keep=keep)

    found = None
    if is_large(tables):
        conversion = Conversion(find_layout, keep, prepare)
        found = store_tables(tables, conversion, folder=settings.folder)
    if found is None:
        parts = []
        for table in tables:
            rows = rows_of(table)
            layout = find_layout(rows, table.place)
            parts.append(layout.convert(rows, source=table.place, keep=keep))
        dropped = Dropped()
        records = prepare([record for part in parts for record in part.records], dropped)
        found = join_counts(parts)._replace(records=records), dropped
    converted, dropped = found
    if not len(converted.records) + dropped.total():
        places = ", ".join(table.place for table in tables)
        reasons = _describe_dropped_rows(converted.left_out)
        raise DataError(f"{places}: no row can be used: {reasons}.")
    return converted, dropped
