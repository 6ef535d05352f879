"""Read the rows of a .jsonl, .json, .csv, .tsv or .parquet file, numbered from 1."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rlhf.base.errors import DataError
from rlhf.base.foreign_errors import translate_errors
from rlhf.data.layouts import KNOWN_COLUMNS

TOO_DEEP = "lists or objects are nested too deep; a row is an object of text or messages."
NOT_LINES = "; call a file .json if its rows are not one object on each line"
OTHER_DELIMITERS = "\t;|"  # spreadsheets may write these instead of commas


def _read_json_lines(file: Path) -> Iterator[tuple[int, object]]:
    with file.open(encoding="utf-8-sig") as lines:
        yield from _parse_lines(lines, file)


def _parse_lines(lines: Iterable[str], file: Path) -> Iterator[tuple[int, object]]:
    for number, line in enumerate(lines, 1):
        if line.strip():
            with _convert_json_errors(f"{file}, row {number}", names_line=False):
                value = DECODER.decode(line.rstrip())
            yield number, value


def _read_json(file: Path) -> Iterator[tuple[int, object]]:
    text = file.read_text(encoding="utf-8-sig").strip()
    if not text:
        return
    with _convert_json_errors(str(file), names_line=True):
        first, end = DECODER.raw_decode(text)
    if end < len(text):
        yield from _parse_lines(text.split("\n"), file)
    else:
        yield from enumerate(_rows_of_json(first), 1)


@contextmanager
def _convert_json_errors(place: str, *, names_line: bool) -> Iterator[None]:
    """Convert JSON errors in the block to a DataError, which names the line if ``names_line``."""
    try:
        yield
    except RecursionError as error:
        raise DataError(f"{place}: {TOO_DEEP}") from error
    except ValueError as error:  # invalid JSON, a repeated key or a number of over 4,300 digits
        reason = str(error).partition("; use sys.")[0]
        if isinstance(error, json.JSONDecodeError):
            line = f"line {error.lineno}, " if names_line else ""
            reason = f"{error.msg} at {line}character {error.colno}"
            reason += NOT_LINES if error.doc.strip() in ("[", "{") else ""
        raise DataError(f"{place}: not JSON: {reason}.") from error


def _build_json_object(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """Return the JSON object of ``pairs``; raise a ValueError if a key occurs twice."""
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"an object has the key {max(names, key=names.count)!r} twice")
    return found


DECODER = json.JSONDecoder(object_pairs_hook=_build_json_object)


def _rows_of_json(value: object) -> list[object]:
    """Return the rows of a whole JSON file: a list, the list under its only key, or one row."""
    if isinstance(value, dict) and len(value) == 1:
        ((key, inner),) = value.items()
        if isinstance(inner, list) and key not in KNOWN_COLUMNS:
            return inner
    return value if isinstance(value, list) else [value]


def _read_csv(file: Path) -> Iterator[tuple[int, object]]:
    number, mark = 0, ","
    with file.open(encoding="utf-8-sig", newline="") as stream:
        try:
            lines = csv.reader(stream, strict=True)
            header = next(lines, [])
            if len(header) == 1:  # no comma: another character may separate the columns
                mark = next((each for each in OTHER_DELIMITERS if each in header[0]), mark)
                header = next(csv.reader(header, delimiter=mark))
                lines = csv.reader(stream, strict=True, delimiter=mark)
            if len(set(header)) < len(header):
                raise DataError(f"{file}: the header names a column twice: {', '.join(header)}.")
            for number, fields in enumerate(filter(None, lines), 1):
                if len(fields) != len(header):
                    raise DataError(
                        f"{file}, row {number}: {len(fields)} fields for {len(header)} columns "
                        f"({', '.join(header)}). Fields are separated by {mark!r}: put a text that "
                        "contains it in double quotes."
                    )
                yield number, dict(zip(header, (field or None for field in fields), strict=True))
        except csv.Error as error:
            longest = f"texts of over {csv.field_size_limit()} characters need .jsonl or .parquet"
            raise DataError(f"{file}, row {number + 1}: {error} ({longest}).") from error


def _read_parquet(file: Path) -> Iterator[tuple[int, object]]:
    from pyarrow import parquet  # type: ignore[import-untyped]

    with (
        translate_errors(lambda reason: DataError(f"{file}: not a parquet file ({reason}).")),
        parquet.ParquetFile(file) as opened,
    ):
        table = opened.read()
    columns: dict[str, list[object]] = {}
    for name, column in zip(table.column_names, table.columns, strict=True):
        if name in columns:
            raise DataError(f"{file}: two columns are named {name!r}; rename one of them.")
        columns[name] = _column_values(column, place=f"{file}: column {name!r}")
    for number, row in enumerate(zip(*columns.values(), strict=True), 1):
        yield number, dict(zip(columns, row, strict=True))


def _column_values(column: Any, *, place: str) -> list[object]:
    # The message names the type: pyarrow's own error may not, for example an unknown time zone.
    kind = column.type
    with translate_errors(
        lambda reason: DataError(f"{place} cannot be read as {kind} ({reason}).")
    ):
        values: list[object] = column.to_pylist()
        return values


Reader = Callable[[Path], Iterator[tuple[int, object]]]
READERS: dict[str, Reader] = {
    ".jsonl": _read_json_lines,
    ".json": _read_json,
    ".csv": _read_csv,
    ".tsv": _read_csv,
    ".parquet": _read_parquet,
}
