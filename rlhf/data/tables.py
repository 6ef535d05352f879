"""Find the rows in files, folders, ``save_to_disk`` folders and datasets of the Hugging Face hub.

    .jsonl     one object per line, or a list of objects
    .json      a list of objects, an object whose one key holds such a list, or one object per line
    .csv       a header and rows; an empty field is null
    .parquet   a table
    a folder   of such files, in sub-folders too, or written by datasets.save_to_disk
    a snapshot of the hub   a folder whose README.md has ``configs``, also in the hub's cache
    samples:NAME   a small file that comes with this package

In a folder of several files (or saved splits), files with a word such as eval, test, validation,
val, valid or dev in their name, or else in the name of their sub-folder, are held out, and all
others are trained on. A dataset of the hub, or a copy of it, has named splits.
"""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from itertools import chain, islice
from pathlib import Path, PurePath
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, NamedTuple

from rlhf.base.errors import DataError
from rlhf.base.foreign_errors import translate_errors
from rlhf.base.user_paths import NOT_PULLED, expand_user_path, find_lfs_pointer
from rlhf.config.choices import Source
from rlhf.config.schema.data import DatasetConfig
from rlhf.data.files import (
    CHUNK,
    DECOMPRESSORS,
    READERS,
    Chunk,
    Reader,
    estimate_text_bytes,
    find_reader,
    number_rows,
)
from rlhf.data.records import Row

if TYPE_CHECKING:
    from datasets import Dataset, DatasetDict

# The first of these words in a name decides if the file is held out; eval, test and validation may
# begin a longer word.
SIDE_WORD = re.compile(
    r"^(?:eval|test|validation)|(?<![a-z])(?:(?P<train>train(?:ing)?)|"
    r"(?:eval(?:uation)?|test(?:ing)?|val|valid(?:ation)?|dev|held[-_ ]?out)(?:set|s)?)(?![a-z])"
)
# Files that describe the data beside them, and that the datasets library skips too.
METADATA = {f"{name}.json" for name in "dataset_info dataset_infos dataset_dict config".split()}
SIDES = ("train", "held out")
MOST_WORDS, LONGEST_WORD = 12, 40  # words in a column that marks rows, and characters of a word
CONFIGS_ENTRY = re.compile(r"\A---\s.*?^configs:", re.DOTALL | re.MULTILINE)  # in a README.md
PACKED_SUFFIXES = {".zip", ".tar", ".7z", ".rar", ".xz", ".lz4", *DECOMPRESSORS}
NO_NETWORK = (
    "use data=local and set data.path to a downloaded copy: a file, a folder of files, or "
    "a folder written by datasets.save_to_disk. For a set of data.sets, set "
    "data.sets.NAME.path to the copy."
)
MOST_NAMED = 8  # names that a message lists
SAMPLES_FOLDER, SAMPLE = Path(__file__).parent / "samples", "samples:"


class Table(NamedTuple):
    """One file or split, which ``read_chunks`` reads from its beginning.

    A chunk is a function that returns (row number, values) of some rows.
    """

    place: str
    read_chunks: Callable[[], Iterator[Chunk]]
    split: str = ""
    """The split that the data set declares for it; "": the table's name decides."""
    bytes: int = 0
    """The bytes of its text, which may be an estimate."""


class Tables(NamedTuple):
    """The tables of one dataset to train on, and its held-out tables."""

    train: list[Table]
    eval: list[Table]
    sides: str = ""
    """Text that names the tables or rows of each side; "" if nothing divides them."""


def find_tables(dataset: DatasetConfig, source: Source, *, key: str) -> Tables:
    """Return the tables of ``dataset``.

    The keys train_split and eval_split choose from a hub dataset; the names of local files decide
    which of them are held out.

    Raises:
        DataError: if the path, file type, split or sample does not exist or cannot be loaded.
        ConfigError: if ``dataset.path``, the value of ``key``, cannot be a path.
    """
    place = _find_sample_file(dataset.path) or expand_user_path(dataset.path, key=key)
    if source is Source.hub:
        if place.exists():
            splits = _read_local_splits(place, dataset)
        else:
            loaded = download_dataset(dataset, fix=NO_NETWORK)
            splits = {name: [table] for name, table in loaded.items()}
        chosen = [split for split in (dataset.train_split, dataset.eval_split) if split]
        for split in chosen:
            if split not in splits:
                raise DataError(
                    f"{dataset.path}: no split '{split}'; choose {' or '.join(splits)}."
                )
        return Tables(splits[chosen[0]], [t for split in chosen[1:] for t in splits[split]])
    return divide_tables_by_name(find_local_tables(place, subset=dataset.subset))


def divide_tables_by_name(tables: Mapping[str, Table]) -> Tables:
    """Hold out the tables with a word such as eval in their name, unless all tables have one."""
    held_out = {name: table for name, table in tables.items() if _is_held_out(table.split or name)}
    train = {name: table for name, table in tables.items() if name not in held_out}
    if not train:
        train, held_out = held_out, {}
    description = f"trains on {join_first_names(train)}" if len(tables) > 1 else ""
    description += f", holds out {join_first_names(held_out)}" if held_out else ""
    return Tables(list(train.values()), list(held_out.values()), description)


def _is_held_out(name: str) -> bool:
    """Return True if, in the path ``name``, the last part with a word for a side means held out."""
    sides = (_find_side(part) for part in reversed(PurePath(name).parts))
    return next(filter(None, sides), "") == SIDES[1]


def _find_side(text: str) -> str:
    """Return the one of ``SIDES`` that a name such as hh_test-1 means; "" if it means none."""
    match = SIDE_WORD.search(text.lower())
    return SIDES[not match["train"]] if match else ""


def divide_tables_by_column(tables: Tables) -> Tables:
    """Hold out rows that a column marks with words such as test and valid1, unless it marks all.

    Raises:
        DataError: if a column has words for both sides, and other values.
    """
    train: list[Table] = []
    held_out, descriptions = list(tables.eval), [tables.sides] if tables.sides else []
    for table in tables.train:
        column, words = _find_held_out_words(table)
        for side in (train, held_out) if words else ():
            read = partial(_chunks_of_side, table, column, words, side is held_out)
            if any(True for chunk in read() for _ in chunk()):
                side.append(table._replace(read_chunks=read))
        if words:
            descriptions.append(f"holds out rows with {column}={' or '.join(sorted(words))}")
        else:
            train.append(table)
    return Tables(train, held_out, "; ".join(dict.fromkeys(descriptions))) if train else tables


def _find_held_out_words(table: Table) -> tuple[str, set[str]]:
    """Return a column that marks rows of a table as held out, and its words for them, or ""."""
    first_rows = list(islice(iterate_rows(table), CHUNK))
    for column in dict.fromkeys(name for row in first_rows for name in row.values):
        words = _texts_of(column, first_rows)
        is_short = len(words) <= MOST_WORDS and all(len(word) <= LONGEST_WORD for word in words)
        if not is_short or not any(map(_find_side, words)):
            continue
        sides = {word: _find_side(word) for word in _texts_of(column, iterate_rows(table))}
        if {*SIDES, ""} <= set(sides.values()):
            raise DataError(
                f"{table.place}: the column '{column}' marks rows to train on and to hold out, and "
                f"has other values too: {', '.join(sorted(sides))}. Remove the other rows."
            )
        if set(sides.values()) <= set(SIDES):
            return column, {word for word, side in sides.items() if side == SIDES[1]}
    return "", set()


def _texts_of(column: str, rows: Iterable[Row]) -> set[str]:
    values = (row.values.get(column) for row in rows)
    return {value for value in values if isinstance(value, str) and value.strip()}


def _chunks_of_side(
    table: Table, column: str, words: set[str], is_held_out: bool
) -> Iterator[Chunk]:
    for chunk in table.read_chunks():
        yield partial(_rows_of_side, chunk, column, words, is_held_out)


def _rows_of_side(
    chunk: Chunk, column: str, words: set[str], is_held_out: bool
) -> Iterator[tuple[int, object]]:
    for number, values in chunk():
        if (isinstance(values, dict) and values.get(column) in words) == is_held_out:
            yield number, values


def join_first_names(names: Iterable[str]) -> str:
    """Return the first names as one text, with the number of further names."""
    all_names = list(names)
    further = len(all_names) - MOST_NAMED
    return ", ".join(all_names[:MOST_NAMED]) + (f" and {further} more" if further > 0 else "")


def find_local_tables(
    place: Path, readers: Mapping[str, Reader] = READERS, *, subset: str | None = None
) -> dict[str, Table]:
    """Return the tables of a file or a folder by name; ``subset`` chooses from a README's configs.

    A table is named by the path of its file, relative to the folder.
    """
    if is_saved_dataset(place):
        return _read_saved_folder(place)
    return _tables_of_files(place, readers, subset=subset)


def is_saved_dataset(place: Path) -> bool:
    """Return True if save_to_disk of a Dataset or a DatasetDict has written ``place``."""
    return (place / "state.json").exists() or (place / "dataset_dict.json").exists()


def read_table_rows(place: Path) -> list[Row]:
    """Return the rows of a file, or of all files in a folder, without conversion."""
    return [row for table in _tables_of_files(place).values() for row in rows_of(table)]


def rows_of(table: Table) -> list[Row]:
    """Return all rows of a table; raise a DataError if there are none."""
    rows = list(iterate_rows(table))
    if not rows:
        raise DataError(f"{table.place}: empty; must have at least one row.")
    return rows


def iterate_rows(table: Table) -> Iterator[Row]:
    """Yield the rows of a table as they are read.

    Raises:
        DataError: if the table cannot be read, or a row is not an object.
    """
    with translate_read_errors(table.place):
        for chunk in table.read_chunks():
            yield from rows_of_chunk(chunk, table.place)


@contextmanager
def translate_read_errors(place: str) -> Iterator[None]:
    """Raise a DataError that names the ``place`` of a table if it cannot be read in the block."""
    with translate_errors(lambda reason: DataError(f"{place}: cannot be read ({reason}).")):
        try:
            yield
        except UnicodeDecodeError as error:
            raise DataError(f"{place}: not UTF-8 text ({error}). Save it as UTF-8.") from error


def rows_of_chunk(chunk: Chunk, place: str) -> Iterator[Row]:
    """Yield the rows of a chunk of the table at ``place``; raise DataError if one is no object."""
    for number, values in chunk():
        if not isinstance(values, dict):
            kind = type(values).__name__
            raise DataError(f"{place}, row {number}: of type {kind}; a row must be an object.")
        yield Row(place, number, values)


def _find_sample_file(path: str) -> Path | None:
    """Return the file of this package that ``samples:NAME`` names; None for other paths."""
    if not path.startswith(SAMPLE):
        return None
    file_by_name = {file.stem: file for file in sorted(SAMPLES_FOLDER.iterdir())}
    name = path.removeprefix(SAMPLE)
    if name not in file_by_name:
        choices = f" or {SAMPLE}".join(file_by_name)
        raise DataError(f"{path}: no such sample; choose {SAMPLE}{choices}.")
    return file_by_name[name]


def _tables_of_files(
    place: Path, readers: Mapping[str, Reader] = READERS, *, subset: str | None = None
) -> dict[str, Table]:
    if not place.exists():
        raise DataError(
            f"{place}: no such file or folder. (A hub data set needs data=hub; plan=only with "
            "data.size=EXAMPLES plans without the file.)"
        )
    if not (place.is_file() or place.is_dir()):
        raise DataError(f"{place}: must be a file or a folder.")
    with translate_read_errors(str(place)):
        root = find_snapshot(place)
        splits = _read_configs(root, subset) or {"": list_files(root)}
    file_by_name = {
        str(file.relative_to(root)) if root.is_dir() else file.name: (split, file, reader)
        for split, files in splits.items()
        for file in files
        if (reader := find_reader(file, readers)) is not None
        and (file == root or file.name not in METADATA)
    }
    if not file_by_name:
        packed = [file.name for files in splits.values() for file in files]
        packed = [name for name in packed if PurePath(name).suffix.lower() in PACKED_SUFFIXES]
        known = f"supported: {', '.join(readers)}, also with {' or '.join(DECOMPRESSORS)}"
        known += f"; {packed[0]}: unpack it first" if packed else ""
        raise DataError(f"{place}: no file that can be read; {known}.")
    _require_regular_files(file for _, file, _ in file_by_name.values())
    if pointer := find_lfs_pointer(file for _, file, _ in file_by_name.values()):
        raise DataError(f"{pointer}: {NOT_PULLED}.")
    return {
        name: Table(str(file), partial(reader, file), split, estimate_text_bytes(file))
        for name, (split, file, reader) in file_by_name.items()
    }


def list_files(place: Path) -> list[Path]:
    """Return the file ``place``, or all paths in the folder ``place`` except hidden ones."""
    if not place.is_dir():
        return [place]
    paths = sorted(place.rglob("*"))
    return [path for path in paths if not any(p[0] == "." for p in path.relative_to(place).parts)]


def find_snapshot(place: Path) -> Path:
    """Return the main snapshot if ``place`` is a data set's folder in the hub's cache."""
    main = place / "refs" / "main"
    return place / "snapshots" / main.read_text().strip() if main.is_file() else place


def has_configs(file: Path) -> bool:
    """Return True if ``file`` is a README.md that names the files of a data set's splits."""
    is_readme = file.name == "README.md" and file.is_file()
    return is_readme and CONFIGS_ENTRY.match(file.read_text("utf-8", errors="replace")) is not None


def _read_configs(place: Path, subset: str | None) -> dict[str, list[Path]]:
    """Return the files of each split by the README.md of a data set; {} if it declares none."""
    readme = place / "README.md"
    if not has_configs(readme):
        return {}
    import datasets

    def build_config_error(reason: str) -> DataError:
        return DataError(
            f"{readme}: its configs cannot be used ({reason}). Choose one of them with "
            "data.subset=NAME (or data.sets.NAME.subset), or name a file or a folder."
        )

    with translate_errors(build_config_error), TemporaryDirectory() as unused:
        try:
            built = datasets.load_dataset_builder(str(place), name=subset, cache_dir=unused)
        except ValueError as error:
            raise build_config_error(" ".join(str(error).splitlines()[:2])) from error
    splits = built.config.data_files or {}
    return {  # their paths are absolute, and tables are named by their paths in ``place``
        str(split): [place / os.path.relpath(file, place) for file in files]
        for split, files in splits.items()
    }


def _require_regular_files(files: Iterable[Path]) -> None:
    for file in files:
        if not file.is_file():  # reading a named pipe or a device may never end
            raise DataError(f"{file}: must be a regular file.")


def _read_local_splits(place: Path, dataset: DatasetConfig) -> dict[str, list[Table]]:
    """Return a hub dataset's splits from a ``save_to_disk`` folder or files like test-0.parquet."""
    splits: defaultdict[str, list[Table]] = defaultdict(list)
    for name, table in find_local_tables(place, subset=dataset.subset).items():
        by_name = dataset.train_split if place.is_file() else re.split(r"[-.]", Path(name).name)[0]
        splits[table.split or by_name].append(table)
    return splits


def _read_saved_folder(place: Path) -> dict[str, Table]:
    import datasets

    def build_load_error(reason: str) -> DataError:
        return DataError(f"{place}: not a readable save_to_disk folder ({reason}).")

    with translate_errors(build_load_error):
        _require_regular_files(file for file in place.rglob("*") if not file.is_dir())
        return _tables_of_splits(str(place), datasets.load_from_disk(str(place)))


def download_dataset(dataset: DatasetConfig, *, fix: str) -> dict[str, Table]:
    """Return all splits of a data set of the hub.

    Raises:
        DataError: if the data set cannot be loaded; ``fix`` is the advice if there is no network.
    """
    import datasets

    path = dataset.path

    def build_load_error(reason: str) -> DataError:
        problem = f"this hub data set could not be loaded ({reason})"
        return DataError(f"{path}: {problem}. Without a network {fix}")

    with translate_errors(build_load_error):
        loaded = datasets.load_dataset(path, name=dataset.subset, revision=dataset.revision)
        splits = loaded.values() if isinstance(loaded, datasets.DatasetDict) else [loaded]
        # Without a network the library uses the revision whose folder was changed last.
        for file in chain.from_iterable(split.cache_files for split in splits):
            with suppress(OSError):
                os.utime(Path(file["filename"]).parent)
        return _tables_of_splits(path, loaded)


def _tables_of_splits(path: str, loaded: Dataset | DatasetDict) -> dict[str, Table]:
    import datasets

    splits = loaded if isinstance(loaded, datasets.DatasetDict) else {"train": loaded}
    return {
        name: Table(
            f"{path}, split {name}", partial(_chunks_of_split, split), name, split.data.nbytes
        )
        for name, split in splits.items()
    }


def _chunks_of_split(split: Dataset) -> Iterator[Chunk]:
    for first_row in range(0, len(split), CHUNK):
        yield partial(_rows_of_split, split, first_row)


def _rows_of_split(split: Dataset, first_row: int) -> Iterator[tuple[int, object]]:
    return number_rows(split[first_row : first_row + CHUNK], first_row + 1)
