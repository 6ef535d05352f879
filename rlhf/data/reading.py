"""Read datasets from files, folders, ``datasets.save_to_disk`` and the Hugging Face hub.

    .jsonl     one object per line
    .json      a list of objects, an object whose one key holds such a list, or one object per line
    .csv       a header and rows; an empty field is null
    .parquet   a table
    a folder   of such files, or written by datasets.save_to_disk
    samples:NAME   a small file that comes with this package

In a folder of several files (or saved splits), files named eval*, test* or validation* are held out
and all others are trained on. A dataset of the hub, or a copy of it, has named splits.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from rlhf.config.choices import Phase, Source
from rlhf.config.schema.data import DataConfig, DatasetConfig
from rlhf.data.cleaning import clean, leave_out_repeated
from rlhf.data.column_rules import ColumnRules, parse_columns
from rlhf.data.detect import Converted, to_records
from rlhf.data.files import READERS
from rlhf.data.layouts import Row
from rlhf.data.records import RawDataset
from rlhf.data.synthetic_pairs import generate_records, with_answers
from rlhf.errors import DataError

if TYPE_CHECKING:
    from datasets import Dataset, DatasetDict

SAMPLES, SAMPLE = Path(__file__).parent / "samples", "samples:"
Names = Sequence[str]  # of columns


def load_datasets(config: DataConfig, *, seed: int, keep: Sequence[str] = ()) -> list[RawDataset]:
    """Return every dataset that ``config`` names, in order; only generated data uses ``seed``.

    The records of PPO's datasets keep the columns ``keep``, which rewards read.

    Raises:
        DataError: if data is missing, unreadable, malformed or without a usable row.
        ConfigError: if the columns of an entry in data.sets are described wrongly.
    """
    datasets = _read(config, seed=seed, keep=keep)
    if config.clean:
        datasets = [clean(dataset) for dataset in datasets]
    return leave_out_repeated(datasets) if config.deduplicate else datasets


def _read(config: DataConfig, *, seed: int, keep: Names) -> list[RawDataset]:
    if config.source is Source.synthetic:
        records = with_answers(generate_records(config.size, seed=seed), keep)
        return [_raw_dataset("synthetic", Converted(records, "preference", Counter()), None)]
    if config.sets:
        return _read_sets(config, keep)
    paths = _entries(config.path, key="data.path")
    eval_paths: list[str] | list[None] = [None] * len(paths)
    if config.eval_path is not None:
        eval_paths = _entries(config.eval_path, key="data.eval_path")
    if len(eval_paths) != len(paths):
        raise DataError(
            f"data.eval_path has {len(eval_paths)} entries and data.path {len(paths)}: give one "
            "entry for each data.path entry, in the same order, or set data.eval_path=null to hold "
            "out a share of each data set."
        )
    pairs = zip(paths, eval_paths, strict=True)
    return [_load(path, eval_path, config, keep) for path, eval_path in pairs]


def _read_sets(config: DataConfig, keep: Names) -> list[RawDataset]:
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
        tables = _find(dataset, config.source)
        wanted = keep if Phase.ppo in (dataset.phases or Phase) else ()
        held_out = _convert(tables.eval, rules.get(name), wanted) if tables.eval else None
        raw = _raw_dataset(name, _convert(tables.train, rules.get(name), wanted), held_out)
        read.append(raw._replace(weight=dataset.weight, phases=dataset.phases))
    return read


def describe(dataset: RawDataset) -> str:
    """Return one line for the terminal: name, layout, examples, and dropped rows by reason."""
    own_eval = "" if dataset.eval is None else f" ({len(dataset.eval):,} held out)"
    records = [*dataset.train, *(dataset.eval or [])]
    prompted = [record for record in records if record.prompt is not None]
    lacking = {
        "chosen": sum(record.chosen is None for record in prompted),
        "rejected": sum(record.rejected is None for record in prompted),
    }
    without = "".join(
        f", {count:,} without {part}" for part, count in lacking.items() if 0 < count < len(records)
    )
    used = f"{len(records):,} examples{own_eval}{without}, {_reasons(dataset.left_out)}"
    return f"{dataset.name}: {dataset.layout}, {used}"


def _reasons(left_out: Counter[str]) -> str:
    reasons = ", ".join(f"{count:,} {reason}" for reason, count in left_out.most_common() if count)
    return f"{left_out.total():,} skipped" + (f" ({reasons})" if reasons else "")


def _entries(value: object, *, key: str) -> list[str]:
    entries = value if isinstance(value, list) else [value]
    texts = [entry for entry in entries if isinstance(entry, str) and entry]
    if not texts or len(texts) < len(entries):
        raise DataError(f"{key}={value}: must be a file, a folder, a hub id, or a list of them.")
    return texts


class _Table(NamedTuple):
    """The rows of one file or split, read on iteration; ``rows`` yields (number, values)."""

    place: str
    rows: Iterable[tuple[int, object]]


class _Tables(NamedTuple):
    train: list[_Table]
    eval: list[_Table]


def _load(path: str, eval_path: str | None, config: DataConfig, keep: Sequence[str]) -> RawDataset:
    given = DatasetConfig(
        path=path,
        subset=config.subset,
        revision=config.revision,
        train_split=config.train_split,
        eval_split=config.eval_split,
    )
    tables = _find(given, config.source)
    if eval_path is not None:
        if tables.eval:
            raise DataError(
                f"data.eval_path={eval_path}: data.path={path} already has held-out rows "
                f"({tables.eval[0].place}); set data.eval_path=null, or remove those rows."
            )
        given.path = eval_path
        others = _find(given, config.source)
        tables = _Tables(tables.train, others.eval or others.train)
    held_out = _convert(tables.eval, keep=keep) if tables.eval else None
    return _raw_dataset(path, _convert(tables.train, keep=keep), held_out)


def _convert(tables: list[_Table], rules: ColumnRules | None = None, keep: Names = ()) -> Converted:
    convert = to_records if rules is None else rules.convert
    parts = [convert(_rows(table), source=table.place, keep=keep) for table in tables]
    records = [record for part in parts for record in part.records]
    left_out = sum((part.left_out for part in parts), Counter[str]())
    if not records:
        places = ", ".join(table.place for table in tables)
        raise DataError(f"{places}: no row can be used: {_reasons(left_out)}.")
    return Converted(records, " + ".join(dict.fromkeys(part.layout for part in parts)), left_out)


def read_rows(place: Path) -> list[Row]:
    """Return the rows of a file, or of all files in a folder, as they are.

    Raises:
        DataError: if a file cannot be read, or a row is no object.
    """
    return [row for table in _files(place).values() for row in _rows(table)]


def _rows(table: _Table) -> list[Row]:
    rows = []
    try:
        for number, values in table.rows:
            if not isinstance(values, dict):
                rule = f"of type {type(values).__name__}; a row must be an object."
                raise DataError(f"{table.place}, row {number}: {rule}")
            rows.append(Row(table.place, number, values))
    except UnicodeDecodeError as error:
        raise DataError(f"{table.place}: not UTF-8 text ({error}). Save it as UTF-8.") from error
    except OSError as error:
        raise DataError(f"{table.place}: cannot be read ({error}).") from error
    if not rows:
        raise DataError(f"{table.place}: empty; must have at least one row.")
    return rows


def _raw_dataset(name: str, train: Converted, held_out: Converted | None) -> RawDataset:
    sides = [train] if held_out is None else [train, held_out]
    layout = " + ".join(dict.fromkeys(side.layout for side in sides))
    return RawDataset(
        name=name,
        train=train.records,
        eval=None if held_out is None else held_out.records,
        layout=layout,
        left_out=sum((side.left_out for side in sides), Counter[str]()),
    )


def _find(dataset: DatasetConfig, source: Source) -> _Tables:
    """Return the tables of ``dataset``; its keys choose hub splits, file names local tables."""
    place = _sample(dataset.path) or Path(dataset.path).expanduser()
    if source is Source.hub:
        splits = _copy(place, dataset) if place.exists() else _download(dataset)
        wanted = [split for split in (dataset.train_split, dataset.eval_split) if split]
        for split in wanted:
            if split not in splits:
                raise DataError(
                    f"{dataset.path}: no split '{split}'; choose {' or '.join(splits)}."
                )
        return _Tables(splits[wanted[0]], [t for split in wanted[1:] for t in splits[split]])
    tables = _saved(place) if _is_saved(place) else _files(place)
    held_out = [table for name, table in tables.items() if _is_held_out(name)]
    train = [table for name, table in tables.items() if not _is_held_out(name)]
    return _Tables(train, held_out) if train else _Tables(held_out, [])


def _sample(path: str) -> Path | None:
    """Return the file of this package that ``samples:NAME`` names; None for other paths."""
    if not path.startswith(SAMPLE):
        return None
    names = sorted(file.stem for file in SAMPLES.glob("*.jsonl"))
    name = path.removeprefix(SAMPLE)
    if name not in names:
        raise DataError(f"{path}: no such sample; choose {SAMPLE}{f' or {SAMPLE}'.join(names)}.")
    return SAMPLES / f"{name}.jsonl"


def _is_held_out(name: str) -> bool:
    return name.lower().startswith(("eval", "test", "validation"))


def _files(place: Path) -> dict[str, _Table]:
    if not place.exists():
        raise DataError(f"{place}: no such file or folder. (A data set of the hub needs data=hub.)")
    if not (place.is_file() or place.is_dir()):
        raise DataError(f"{place}: must be a file or a folder.")
    candidates = [place] if place.is_file() else sorted(place.iterdir())
    files = [file for file in candidates if file.suffix.lower() in READERS]
    if not files:
        raise DataError(f"{place}: no file that can be read; supported: {', '.join(READERS)}.")
    return {file.name: _Table(str(file), READERS[file.suffix.lower()](file)) for file in files}


def _copy(place: Path, dataset: DatasetConfig) -> dict[str, list[_Table]]:
    """Return the splits of a hub dataset on disk: saved, or in files such as test-00000.parquet."""
    if _is_saved(place):
        return {name: [table] for name, table in _saved(place).items()}
    splits: defaultdict[str, list[_Table]] = defaultdict(list)
    for name, table in _files(place).items():
        splits[dataset.train_split if place.is_file() else re.split(r"[-.]", name)[0]].append(table)
    return splits


def _is_saved(place: Path) -> bool:
    """Return True if save_to_disk of a Dataset or a DatasetDict has written ``place``."""
    return (place / "state.json").exists() or (place / "dataset_dict.json").exists()


def _saved(place: Path) -> dict[str, _Table]:
    import datasets

    try:
        return _splits(str(place), datasets.load_from_disk(str(place)))
    except (OSError, ValueError) as error:
        raise DataError(f"{place}: not a readable save_to_disk folder ({error}).") from error


def _download(dataset: DatasetConfig) -> dict[str, list[_Table]]:
    import datasets

    path = dataset.path
    try:
        loaded = datasets.load_dataset(path, name=dataset.subset, revision=dataset.revision)
    except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        raise DataError(
            f"{path}: this data set of the hub could not be loaded ({error}). Without a network "
            "use data=local and set data.path to a downloaded copy: a file, a folder of files, or "
            "a folder written by datasets.save_to_disk. For a set of data.sets, set "
            "data.sets.NAME.path to the copy."
        ) from error
    return {name: [table] for name, table in _splits(path, loaded).items()}


def _splits(path: str, loaded: Dataset | DatasetDict) -> dict[str, _Table]:
    import datasets

    splits = loaded if isinstance(loaded, datasets.DatasetDict) else {"train": loaded}
    return {
        name: _Table(f"{path}, split {name}", enumerate(split, 1)) for name, split in splits.items()
    }
