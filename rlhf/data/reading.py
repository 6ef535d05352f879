"""Load the datasets that a configuration names, and describe each dataset in one line."""

from __future__ import annotations

from collections import Counter

from rlhf.base.errors import DataError
from rlhf.config.choices import Phase, Source
from rlhf.config.schema.data import DatasetConfig
from rlhf.data.column_rules import NONE_WANTED, Converted, Layout, Wanted, parse_columns
from rlhf.data.detect import to_records
from rlhf.data.records import RawDataset, clean_dataset, drop_repeated_examples
from rlhf.data.synthetic_pairs import add_right_answers, generate_records
from rlhf.data.tables import Table, Tables, find_tables, join_first_names, rows_of
from rlhf.options import DataConfig


def load_datasets(config: DataConfig, *, seed: int, keep: Wanted = NONE_WANTED) -> list[RawDataset]:
    """Return every dataset that ``config`` names, in order; only generated data uses ``seed``.

    ``keep`` names columns that rewards or the reward model's loss read. A record gets a column only
    if its dataset is used by the phase that reads the column.

    Raises:
        DataError: if data is missing, unreadable, malformed or without a usable row.
        ConfigError: if data.sets.NAME.columns is invalid.
    """
    datasets = _read_datasets(config, seed=seed, keep=keep)
    if config.clean:
        datasets = [clean_dataset(dataset) for dataset in datasets]
    return drop_repeated_examples(datasets) if config.deduplicate else datasets


def _read_datasets(config: DataConfig, *, seed: int, keep: Wanted) -> list[RawDataset]:
    if config.source is Source.synthetic:
        records = add_right_answers(generate_records(config.size, seed=seed), keep)
        return [RawDataset("synthetic", records, None, "preference", Counter())]
    if config.sets:
        return _read_blended_datasets(config, keep)
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
    return [_load_dataset(path, eval_path, config, keep) for path, eval_path in pairs]


def _read_blended_datasets(config: DataConfig, keep: Wanted) -> list[RawDataset]:
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
            for column, key in keep.items()
            if _find_reading_phase(key) in (dataset.phases or Phase)
        }
        raw = _convert_dataset(name, tables, rules.get(name), wanted)
        read.append(raw._replace(weight=dataset.weight, phases=dataset.phases))
    return read


def _find_reading_phase(key: str) -> Phase:
    """Return the phase that reads the data column which the config key ``key`` names."""
    return Phase.reward if key.startswith("reward.") else Phase.ppo


def describe_dataset(dataset: RawDataset) -> str:
    """Return one line for the terminal: name, layout, examples, and dropped rows by reason."""
    own_eval = "" if dataset.eval is None else f" ({len(dataset.eval):,} held out)"
    records = [*dataset.train, *(dataset.eval or [])]
    prompted = [record for record in records if record.prompt is not None]
    without = ""
    for part in ("chosen", "rejected"):
        count = sum(getattr(record, part) is None for record in prompted)
        without += f", {count:,} without {part}" if 0 < count < len(records) else ""
    pairs = {(each.prompt, each.chosen, each.rejected) for each in records if each.rejected}
    reversed_ones = sum((prompt, worse, better) in pairs for prompt, better, worse in pairs)
    without += f", {reversed_ones:,} with their reverse" if reversed_ones else ""
    examples = f"{len(records):,} examples{own_eval}{without}"
    skipped = _describe_dropped_rows(dataset.left_out)
    talks = [r for r in records if r.messages is not None and r.chosen is not None]
    total = sum(record.answers for record in talks)
    learned = sum(record.learned_answers for record in talks)
    share = f"{learned:,}" if learned == total else f"{learned:,} of {total:,}"
    answers = f"learns {share} answers of {len(talks):,} conversations"
    notes = {
        f"{dataset.name}: {dataset.layout}, {examples}, {skipped}": True,
        answers: total > len(talks),
        f"reads {join_first_names(dataset.read)}": dataset.read,
        f"not read: {join_first_names(dataset.unread)}": dataset.unread,
        dataset.sides: dataset.sides,
    }
    return "; ".join(note for note, is_given in notes.items() if is_given)


def _describe_dropped_rows(left_out: Counter[str]) -> str:
    reasons = ", ".join(f"{count:,} {reason}" for reason, count in left_out.most_common() if count)
    return f"{left_out.total():,} skipped" + (f" ({reasons})" if reasons else "")


def _list_data_paths(value: object, *, key: str) -> list[str]:
    entries = value if isinstance(value, list) else [value]
    texts = [entry for entry in entries if isinstance(entry, str) and entry]
    if not texts or len(texts) < len(entries):
        raise DataError(f"{key}={value}: must be a file, a folder, a hub id, or a list of them.")
    return texts


def _load_dataset(path: str, eval_path: str | None, config: DataConfig, keep: Wanted) -> RawDataset:
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
    return _convert_dataset(path, tables, None, keep)


def _convert_dataset(name: str, tables: Tables, rules: Layout | None, keep: Wanted) -> RawDataset:
    held_out = _convert_tables(tables.eval, rules, keep) if tables.eval else None
    train = _convert_tables(tables.train, rules, keep)
    both = train if held_out is None else _join_parts([train, held_out])
    return RawDataset(
        name,
        train.records,
        None if held_out is None else held_out.records,
        both.layout,
        both.left_out,
        read=both.read,
        unread=both.unread,
        sides=tables.sides,
    )


def _convert_tables(tables: list[Table], rules: Layout | None, keep: Wanted) -> Converted:
    convert = to_records if rules is None else rules.convert
    found = _join_parts(
        [convert(rows_of(table), source=table.place, keep=keep) for table in tables]
    )
    if not found.records:
        places = ", ".join(table.place for table in tables)
        reasons = _describe_dropped_rows(found.left_out)
        raise DataError(f"{places}: no row can be used: {reasons}.")
    return found


def _join_parts(parts: list[Converted]) -> Converted:
    return Converted(
        [record for part in parts for record in part.records],
        " + ".join(dict.fromkeys(part.layout for part in parts)),
        sum((part.left_out for part in parts), Counter[str]()),
        tuple(dict.fromkeys(name for part in parts for name in part.read)),
        tuple(dict.fromkeys(name for part in parts for name in part.unread)),
    )
