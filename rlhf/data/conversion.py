"""Rows -> records: which layout the rows of a source are in, and what of them can be used."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from rlhf.data.formats import LAYOUTS, Kind, Layout, Row, UnusableRowError
from rlhf.data.records import Record
from rlhf.errors import DataError


class Converted(NamedTuple):
    """The usable rows of one source, the layout they were in, and the rows left out by reason."""

    records: list[Record]
    layout: str
    left_out: Counter[str]


def detect_layout(rows: Sequence[Row], *, source: str) -> Layout:
    """The layout of ``rows``: the first whose columns they have, by what the columns hold.

    A column's kind is that of its first value that is neither null nor an empty list; further
    columns do not matter.

    Raises:
        DataError: no layout has these columns, or none has these kinds in them; names ``source``.
    """
    present = dict.fromkeys(column for row in rows for column in row.values)
    named = next((layout for layout in LAYOUTS if layout.columns.keys() <= present.keys()), None)
    if named is None:
        raise DataError(_no_layout(source, ", ".join(present)))
    kinds = {column: _kind(rows, column) for column in named.columns}
    for layout in LAYOUTS:
        same_columns = layout.columns.keys() == kinds.keys()
        if same_columns and all(kinds[c] in (None, layout.columns[c]) for c in kinds):
            return layout
    found = (f"{column} ({kind or 'nothing but nulls'})" for column, kind in kinds.items())
    raise DataError(_no_layout(source, ", ".join(found)))


def to_records(rows: Sequence[Row], *, source: str, layout: Layout | None = None) -> Converted:
    """Convert ``rows``, leaving out and counting those that cannot be used.

    ``layout`` None: the one that their columns tell.

    Raises:
        DataError: no layout fits (names ``source``), or a row is of the wrong type (names its file,
            number and column).
    """
    layout = layout or detect_layout(rows, source=source)
    records: list[Record] = []
    left_out: Counter[str] = Counter()
    for row in rows:
        try:
            records += layout.convert(row, layout.columns)
        except UnusableRowError as reason:
            left_out[str(reason)] += 1
    return Converted(records, layout.name, left_out)


def _kind(rows: Sequence[Row], column: str) -> Kind | None:
    values = (row.values.get(column) for row in rows)
    first = next((value for value in values if value not in (None, [])), None)
    if first is None:
        return None
    if not isinstance(first, list):
        return Kind.text
    return Kind.texts if isinstance(first[0], str) else Kind.messages


def _no_layout(source: str, found: str) -> str:
    lines = [f"{source}: no known layout has the columns {found}. Known layouts:"]
    for layout in LAYOUTS:
        columns = ", ".join(f"{column} ({kind})" for column, kind in layout.columns.items())
        lines.append(f"  {layout.name}: {columns}")
    return "\n".join(lines)
