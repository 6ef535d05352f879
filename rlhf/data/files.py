"""Read the rows of a .jsonl, .json, .csv, .tsv or .parquet file, numbered from 1.

All but .parquet are UTF-8, UTF-16 or UTF-32 text, and may be compressed (gzip, bzip2, zstd, under
any name): their first bytes decide. A reader yields chunks, each a function that returns up to
``CHUNK`` rows, or all rows of a .json array. Only the call of this function parses the rows (except
csv), so a process can skip the chunks that other processes convert.
"""

from __future__ import annotations

import bz2
import csv
import gzip
import io
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, TextIO

from rlhf.base.errors import DataError
from rlhf.base.foreign_errors import translate_errors
from rlhf.data.detect import known_columns

TOO_DEEP = "lists or objects are nested too deep; a row is an object of text or messages."
NOT_LINES = "; call a file .json if its rows are not one object on each line"
OTHER_DELIMITERS = "\t;|"  # spreadsheets may write these instead of commas
CHUNK = 10_000  # rows
PACKED_RATIO = 3  # assumed bytes of text per byte of a compressed file

Numbered = tuple[int, object]  # the number of a row, from 1, and the row
Chunk = Callable[[], Iterable[Numbered]]
Reader = Callable[[Path], Iterator[Chunk]]


def _open_zstd(file: Path, _mode: str) -> Any:
    import pyarrow  # type: ignore[import-untyped]

    return pyarrow.input_stream(str(file), compression="zstd")


# Suffix of a compressed file -> its first bytes, which are recognised under any name; its opener.
DECOMPRESSORS: dict[str, tuple[bytes, Callable[[Path, str], Any]]] = {
    ".gz": (b"\x1f\x8b", gzip.open),
    ".bz2": (b"BZh", bz2.open),
    ".zst": (b"\x28\xb5\x2f\xfd", _open_zstd),
}


def open_text(file: Path, newline: str | None = None) -> TextIO:
    """Open a file of Unicode text, which may be compressed; ``newline`` is as in ``open``."""
    with file.open("rb") as packed:
        first_bytes = packed.read(4)
    decompress: Callable[[Path, str], Any] = open
    for suffix, (mark, opener) in DECOMPRESSORS.items():
        if file.suffix.lower() == suffix or first_bytes.startswith(mark):
            decompress = opener
    with decompress(file, "rb") as stream:
        encoding = json.detect_encoding(stream.read(4))
    return io.TextIOWrapper(decompress(file, "rb"), encoding=encoding, newline=newline)


def estimate_text_bytes(file: Path) -> int:
    """Return the bytes of a file after decompression, guessed if it is compressed."""
    is_packed = file.suffix.lower() in {*DECOMPRESSORS, ".parquet"}
    return file.stat().st_size * (PACKED_RATIO if is_packed else 1)


def find_reader(file: Path, readers: Mapping[str, Reader] | None = None) -> Reader | None:
    """Return the reader for the end of a file's name, such as .csv or .csv.gz, or None."""
    suffix = file.suffix.lower()
    if is_compressed := suffix in DECOMPRESSORS:
        suffix = Path(file.stem).suffix.lower()
    reader = (READERS if readers is None else readers).get(suffix)
    return None if is_compressed and reader is _read_parquet else reader


def _read_json_lines(file: Path) -> Iterator[Chunk]:
    first_row = 1
    with open_text(file) as lines:
        while text := "".join(islice(lines, CHUNK)):
            if first_row == 1 and text.lstrip().startswith("["):
                yield from _read_json(file)  # one array, in spite of the name
                return
            yield partial(_parse_lines, text, file, first_row)
            first_row += CHUNK


def _parse_lines(text: str, file: Path, first_number: int = 1) -> Iterator[Numbered]:
    for number, line in enumerate(text.split("\n"), first_number):
        if content := line.rstrip():
            try:
                value = DECODER.decode(content)
            except (RecursionError, ValueError) as error:
                raise _build_json_error(error, f"{file}, row {number}") from error
            yield number, value


def _read_json(file: Path) -> Iterator[Chunk]:
    yield partial(_parse_json, file)


def _parse_json(file: Path) -> Iterator[Numbered]:
    with open_text(file) as opened:
        text = opened.read().strip()
    if not text:
        return
    try:
        content, end = DECODER.raw_decode(text)
    except (RecursionError, ValueError) as error:
        raise _build_json_error(error, str(file), names_line=True) from error
    if end < len(text):
        yield from _parse_lines(text, file)
    else:
        yield from enumerate(_rows_of_json(content), 1)


def _build_json_error(error: Exception, place: str, *, names_line: bool = False) -> DataError:
    """Return the DataError for invalid or too deep JSON, a repeated key or a too long number."""
    if isinstance(error, RecursionError):
        return DataError(f"{place}: {TOO_DEEP}")
    reason = str(error).partition("; use sys.")[0]
    if isinstance(error, json.JSONDecodeError):
        line = f"line {error.lineno}, " if names_line else ""
        reason = f"{error.msg} at {line}character {error.colno}"
        reason += NOT_LINES if error.doc.strip() in ("[", "{") else ""
    return DataError(f"{place}: not JSON: {reason}.")


def _build_json_object(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """Return the JSON object of ``pairs``; raise a ValueError if a key occurs twice."""
    content = dict(pairs)
    if len(content) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"an object has the key {max(names, key=names.count)!r} twice")
    return content


def _read_constant(name: str) -> float | None:
    """Return None for NaN, with which pandas writes a missing value."""
    return None if name == "NaN" else float(name)


DECODER = json.JSONDecoder(object_pairs_hook=_build_json_object, parse_constant=_read_constant)


def _rows_of_json(value: object) -> list[object]:
    """Return the rows of a whole JSON file: a list, the list under its only key, or one row."""
    if isinstance(value, dict) and len(value) == 1:
        ((key, inner),) = value.items()
        if isinstance(inner, list) and key not in known_columns():
            return inner
    return value if isinstance(value, list) else [value]


def _read_csv(file: Path) -> Iterator[Chunk]:
    with open_text(file, newline="") as stream:
        rows = _parse_csv(stream, file)
        while chunk := list(islice(rows, CHUNK)):
            yield partial(iter, chunk)


def _parse_csv(stream: TextIO, file: Path) -> Iterator[Numbered]:
    number, mark = 0, ","
    try:
        lines = csv.reader(stream, strict=True)
        header = next(lines, [])
        if header == ["sep=", ""]:  # Excel writes such a line above the header
            header = next(lines, [])
        elif len(header) == 1:  # no comma: another character may separate the columns
            mark = next((char for char in OTHER_DELIMITERS if char in header[0]), mark)
            is_named = header == [f"sep={mark}"]
            header = next(csv.reader(header, delimiter=mark))
            lines = csv.reader(stream, strict=True, delimiter=mark)
            header = next(lines, []) if is_named else header
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


def _read_parquet(file: Path) -> Iterator[Chunk]:
    from pyarrow import parquet

    def build_file_error(reason: str) -> DataError:
        return DataError(f"{file}: not a parquet file ({reason}).")

    with translate_errors(build_file_error), parquet.ParquetFile(file) as opened:
        names = opened.schema_arrow.names
        if twice := [name for name in names if names.count(name) > 1]:
            raise DataError(f"{file}: two columns are named {twice[0]!r}; rename one of them.")
        first_row = 1
        for batch in opened.iter_batches(batch_size=CHUNK):
            yield partial(_rows_of_batch, batch, file, first_row)
            first_row += len(batch)


def number_rows(columns: Mapping[str, Sequence[object]], first_number: int) -> Iterator[Numbered]:
    """Yield the rows of ``columns``, numbered from ``first_number``."""
    for number, values in enumerate(zip(*columns.values(), strict=True), first_number):
        yield number, dict(zip(columns, values, strict=True))


def _rows_of_batch(batch: Any, file: Path, first_number: int) -> Iterator[Numbered]:
    columns = {
        name: _column_values(column, place=f"{file}: column {name!r}")
        for name, column in zip(batch.schema.names, batch.columns, strict=True)
    }
    return number_rows(columns, first_number)


def _column_values(column: Any, *, place: str) -> list[object]:
    # The message names the type: pyarrow's own error may not, for example an unknown time zone.
    kind = column.type
    with translate_errors(
        lambda reason: DataError(f"{place} cannot be read as {kind} ({reason}).")
    ):
        values: list[object] = column.to_pylist()
        return values


READERS: dict[str, Reader] = {
    ".jsonl": _read_json_lines,
    ".json": _read_json,
    ".csv": _read_csv,
    ".tsv": _read_csv,
    ".parquet": _read_parquet,
}
