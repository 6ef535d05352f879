"""Detect the column layout of a source, and convert its usable rows to records."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from rlhf.base.errors import DataError
from rlhf.data.layouts import LAYOUTS, ColumnKind, Layout
from rlhf.data.records import Record, Row, UnusableRowError

# Expressions with brackets need quotes of their own within the override.
OWN_COLUMNS = (
    "For other columns, say with data.sets.NAME.columns what to read (docs/data.md): "
    "data.path=null "
    "\"data.sets.mine={path: FILE, columns: {prompt: 'human(QUESTION)', chosen: ANSWER}}\""
)


Wanted = Mapping[str, str]  # data columns that rewards read -> the config key that names the column
NONE_WANTED: Wanted = {}


class Converted(NamedTuple):
    """The records of one source, the layout of its rows, and its dropped rows counted by reason."""

    records: list[Record]
    layout: str
    left_out: Counter[str]


def detect_layout(rows: Sequence[Row], *, source: str) -> Layout:
    """Return the layout that matches the columns of ``rows`` and the kinds of these columns.

    The first layout whose columns all exist determines the columns; additional columns are ignored.
    Of the layouts with these columns, the first with matching kinds is returned. A column has the
    kind of its first value that is neither null nor an empty list.
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
    in ``keep``.

    Raises:
        DataError: if no layout fits (the message names ``source``), or a value has the wrong type
            (the message names file, row number and column).
    """
    layout = layout or detect_layout(rows, source=source)
    records: list[Record] = []
    left_out: Counter[str] = Counter()
    for row in rows:
        try:
            found = layout.convert(row, layout.columns)
            records += (
                [each._replace(columns=select_columns(row, keep)) for each in found]
                if keep
                else found
            )
        except UnusableRowError as reason:
            left_out[str(reason)] += 1
    return Converted(records, layout.name, left_out)


def select_columns(row: Row, wanted: Wanted) -> dict[str, object]:
    """Return the ``wanted`` columns of a row; a missing one is a DataError."""
    for name, key in wanted.items():
        if name not in row.values:
            raise row.error(
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
