"""Read the rows of a .jsonl, .json, .csv (without its header) or .parquet file, numbered from 1."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from rlhf.data.layouts import KNOWN_COLUMNS
from rlhf.errors import DataError

TOO_DEEP = "lists or objects are nested too deep; a row is an object of text or messages."


def _read_json_lines(file: Path) -> Iterator[tuple[int, object]]:
    with file.open(encoding="utf-8-sig") as lines:
        yield from _parse_lines(lines, file)


def _parse_lines(lines: Iterable[str], file: Path) -> Iterator[tuple[int, object]]:
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                yield number, json.loads(line)
            except json.JSONDecodeError as error:
                at = f"{error.msg} at character {error.colno}"
                raise DataError(f"{file}, row {number}: not JSON: {at}.") from error
            except RecursionError as error:
                raise DataError(f"{file}, row {number}: {TOO_DEEP}") from error


def _read_json(file: Path) -> Iterator[tuple[int, object]]:
    text = file.read_text(encoding="utf-8-sig").strip()
    if not text:
        return
    try:
        first, end = json.JSONDecoder().raw_decode(text)
    except json.JSONDecodeError as error:
        at = f"{error.msg} at line {error.lineno}, character {error.colno}"
        raise DataError(f"{file}: not JSON: {at}.") from error
    except RecursionError as error:
        raise DataError(f"{file}: {TOO_DEEP}") from error
    if end < len(text):
        yield from _parse_lines(text.split("\n"), file)
    else:
        yield from enumerate(_listed(first), 1)


def _listed(value: object) -> list[object]:
    """Return the rows of a whole JSON file: a list, the list under its only key, or one row."""
    if isinstance(value, dict) and len(value) == 1:
        ((key, inner),) = value.items()
        if isinstance(inner, list) and key not in KNOWN_COLUMNS:
            return inner
    return value if isinstance(value, list) else [value]


def _read_csv(file: Path) -> Iterator[tuple[int, object]]:
    number = 0
    with file.open(encoding="utf-8-sig", newline="") as stream:
        try:
            lines = csv.reader(stream, strict=True)
            header = next(lines, [])
            if len(set(header)) < len(header):
                raise DataError(f"{file}: the header names a column twice: {', '.join(header)}.")
            for number, fields in enumerate(filter(None, lines), 1):
                if len(fields) != len(header):
                    sizes = f"{len(fields)} fields for {len(header)} columns"
                    raise DataError(f"{file}, row {number}: {sizes}.")
                yield number, dict(zip(header, (field or None for field in fields), strict=True))
        except csv.Error as error:
            longest = f"texts of over {csv.field_size_limit()} characters need .jsonl or .parquet"
            raise DataError(f"{file}, row {number + 1}: {error} ({longest}).") from error


def _read_parquet(file: Path) -> Iterator[tuple[int, object]]:
    from pyarrow import ArrowException, parquet  # type: ignore[import-untyped]

    try:
        with parquet.ParquetFile(file) as table:
            rows = table.read().to_pylist()
    except ArrowException as error:
        raise DataError(f"{file}: not a parquet file ({error}).") from error
    yield from enumerate(rows, 1)


READERS: dict[str, Callable[[Path], Iterator[tuple[int, object]]]] = {
    ".jsonl": _read_json_lines,
    ".json": _read_json,
    ".csv": _read_csv,
    ".parquet": _read_parquet,
}
