"""Detect the column layout of a source, and convert its usable rows to records."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import NamedTuple

from rlhf.base.errors import DataError
from rlhf.data.layouts import LAYOUTS, NAMES, SYSTEM, TOOLS, ColumnKind, Layout
from rlhf.data.records import MESSAGE_KEYS, OddRowError, Record, Row, UnusableRowError

# Advice in error messages. An expression with brackets needs quotes of its own in the override.
OWN_COLUMNS = (
    "For other columns, say with data.sets.NAME.columns what to read (docs/data.md): "
    "data.path=null "
    "\"data.sets.mine={path: FILE, columns: {prompt: 'human(QUESTION)', chosen: ANSWER}}\""
)


Wanted = Mapping[str, str]  # data columns that rewards read -> the config key that names the column
NONE_WANTED: Wanted = {}
BLANK: tuple[object, ...] = (None, "", [], {})  # values that count as absent


class Converted(NamedTuple):
    """The records of one source, the layout of its rows, and its dropped rows counted by reason."""

    records: list[Record]
    layout: str
    left_out: Counter[str]
    unread: tuple[str, ...] = ()
    """Columns and keys of messages that hold values and are not read."""


def detect_layout(rows: Sequence[Row], *, source: str) -> Layout:
    """Return the layout that matches the columns of ``rows`` and the kinds of these columns.

    The first layout whose columns are all in ``rows`` is found. Of all layouts with the same
    columns, the first whose kinds match is returned. A column has the kind of its first value
    that is neither null nor an empty list. If no layout matches, a DataError is raised.
    """
    present = dict.fromkeys(column for row in rows for column in row.values)
    named = next((layout for layout in LAYOUTS if layout.columns.keys() <= present.keys()), None)
    if named is None:
        raise DataError(_no_layout_message(source, ", ".join(present)))
    kinds = {column: _kind_of_column(rows, column) for column in named.columns}
    for layout in LAYOUTS:
        same_columns = layout.columns.keys() == kinds.keys()
        if same_columns and all(kinds[c] in (None, layout.columns[c]) for c in kinds):
            return layout
    found = (f"{column} ({kind or 'nothing but nulls'})" for column, kind in kinds.items())
    raise DataError(_no_layout_message(source, ", ".join(found)))


def to_records(
    rows: Sequence[Row], *, source: str, layout: Layout | None = None, keep: Wanted = NONE_WANTED
) -> Converted:
    """Convert ``rows`` to records; drop and count rows that cannot be used.

    If ``layout`` is None, it is detected from the columns. Each record also gets the row's columns
    in ``keep``. If a boolean column grades the responses, rows are dropped unless it is True there.

    Raises:
        DataError: if no layout fits, or a column that is not read would change what is learned (the
            message names ``source``), or a value has the wrong type (the message names file, row
            number and column).
    """
    unread, grades = [], []
    if layout is None:
        layout = detect_layout(rows, source=source)
        unread = unread_columns(rows, (*layout.columns, *keep))
        grades = _find_grading_columns(rows, unread, layout, source)
    records: list[Record] = []
    left_out: Counter[str] = Counter()
    odd: list[OddRowError] = []
    for row in rows:
        try:
            for grade in grades:
                if row.values.get(grade) is not True:
                    raise UnusableRowError(f"{grade} is not true, so its response is not learned")
            columns = select_columns(row, keep) if keep else None
            place, tools = (row.file, row.number), row.tools()
            found = layout.convert(row, layout.columns)
            records += [r._replace(columns=columns, place=place, tools=tools) for r in found]
        except OddRowError as error:
            odd.append(error)
        except UnusableRowError as reason:
            left_out[str(reason)] += 1
    _count_odd_rows(odd, left_out, len(rows))
    names = [each for each in unread if each not in (*grades, SYSTEM, TOOLS)]
    return Converted(records, layout.name, left_out, (*names, *_unread_keys(rows, layout.columns)))


def _count_odd_rows(odd: Sequence[OddRowError], left_out: Counter[str], total: int) -> None:
    """Count odd rows in ``left_out`` by reason, each with the first row; refuse most of the rows.

    Raises:
        DataError: if most of ``total`` rows are odd.
    """
    if 2 * len(odd) > total:
        raise odd[0].fault
    firsts = {str(error): error.row for error in reversed(odd)}
    for error in odd:
        row = firsts[str(error)]
        left_out[f"{error} (first: {row.file}, row {row.number})"] += 1


def unread_columns(rows: Sequence[Row], read: Container[str]) -> list[str]:
    """Return the columns that hold values in ``rows`` and are not in ``read``."""
    present = (name for row in rows for name, value in row.values.items() if value not in BLANK)
    return [str(name) for name in dict.fromkeys(present) if name not in read]


def _unread_keys(rows: Sequence[Row], columns: Iterable[str]) -> list[str]:
    """Return keys with values in messages of ``columns``, except role and text, as COLUMN[].KEY."""
    read = MESSAGE_KEYS
    values = ((column, row.values.get(column)) for column in columns for row in rows)
    items = ((column, item) for column, v in values for item in (v if isinstance(v, list) else [v]))
    found = {
        f"{column}[].{key}": None
        for column, item in items
        if isinstance(item, dict) and item.keys() - read
        for key, value in item.items()
        if key not in read and value not in BLANK
    }
    return list(found)


def _find_grading_columns(
    rows: Sequence[Row], unread: Sequence[str], layout: Layout, source: str
) -> list[str]:
    """Return the ``unread`` columns whose booleans grade the only response of their row.

    Raises:
        DataError: if an unread column is part of the examples, or its grades are not booleans.
    """
    is_pair = "chosen" in layout.columns
    response = next((c for c in layout.columns if c in NAMES["responses"] and not is_pair), None)
    grades = []
    for name in unread:
        kinds = {type(row.values.get(name)) for row in rows}
        is_answer = name == "label" and response is None and str in kinds
        is_turn = name == SYSTEM and "text" not in layout.columns
        if is_answer or (name in NAMES["content"] and not is_turn):
            raise DataError(
                f"{source}: the column '{name}' is a part of the examples, and the layout "
                f"'{layout.name}' does not read it. Remove the column.\n{OWN_COLUMNS}"
            )
        if name not in NAMES["grades"] or response is None:
            continue
        if kinds - {bool, type(None)}:
            raise DataError(
                f"{source}: the column '{name}' grades the column {response}, and "
                "each row would be learned, bad ones too. Select by its values, for example "
                f"data.sets.NAME.columns={{prompt: ..., chosen: 'pick({name} >= `3`, ..., "
                "`null`)'}, or use all of them with {prompt: ..., chosen: ...} (docs/data.md)."
            )
        grades.append(name)
    return grades


def select_columns(row: Row, wanted: Wanted) -> dict[str, object]:
    """Return the ``wanted`` columns of a row; raise a DataError if a column is missing."""
    for name, key in wanted.items():
        if name not in row.values:
            raise row.build_error(
                f"column '{name}' is missing, which {key} names. The row "
                f"has {', '.join(map(repr, row.values))}."
            )
    return {name: row.values[name] for name in wanted}


def _kind_of_column(rows: Sequence[Row], column: str) -> ColumnKind | None:
    values = (row.values.get(column) for row in rows)
    first = next((value for value in values if value not in (None, [])), None)
    if first is None:
        return None
    if not isinstance(first, list):
        return ColumnKind.messages if isinstance(first, dict) else ColumnKind.text
    return ColumnKind.texts if isinstance(first[0], str) else ColumnKind.messages


def _no_layout_message(source: str, found: str) -> str:
    lines = [f"{source}: no known layout has the columns {found}. Known layouts:"]
    for layout in LAYOUTS:
        columns = ", ".join(f"{column} ({kind})" for column, kind in layout.columns.items())
        lines.append(f"  {layout.name}: {columns}")
    lines.append(OWN_COLUMNS)
    return "\n".join(lines)
