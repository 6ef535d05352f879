"""Parse lists of messages that were written as text, as in csv files and by pandas."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Sequence
from itertools import islice
from typing import Any

from rlhf.data.layouts import is_blank
from rlhf.data.records import TEXT_OF, Row

NUM_TRIED = 20  # first texts of a column: if most are lists of messages, all must be
BETWEEN = re.compile(r"\}\s+\{(?=['\"])")  # numpy writes no commas between the items of an array


def are_messages(value: object) -> bool:
    """Return True for a list of messages, or one message."""
    items = value if isinstance(value, list) else [value]
    return bool(items) and all(
        isinstance(item, dict)
        and any({role, text} <= item.keys() for role, text in TEXT_OF.items())
        for item in items
    )


def parse_list(text: str) -> Any:
    """Return the list or object that ``text`` is, in JSON, Python's or numpy's form, or None."""
    if text.lstrip()[:1] not in ("[", "{"):
        return None
    for parse in (json.loads, ast.literal_eval, lambda t: ast.literal_eval(BETWEEN.sub("}, {", t))):
        try:
            value = parse(text.strip())
        except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
            continue
        return value if isinstance(value, list | dict) else None
    return None


def read_written_messages(rows: Sequence[Row]) -> Sequence[Row]:
    """Return ``rows`` with parsed messages in columns whose texts are written lists of messages.

    Raises:
        DataError: if most of a column's first texts are lists of messages, and any text is not.
    """
    for name in dict.fromkeys(name for row in rows for name in row.values):
        values = ((n, row.values.get(name)) for n, row in enumerate(rows))
        texts = {n: value for n, value in values if isinstance(value, str) and not is_blank(value)}
        tried = [are_messages(parse_list(text)) for text in islice(texts.values(), NUM_TRIED)]
        if 2 * sum(tried) <= len(tried):
            continue
        parsed = {n: parse_list(text) for n, text in texts.items()}
        odd = [n for n, value in parsed.items() if not are_messages(value)]
        if odd:
            raise rows[odd[0]].build_error(
                f"column '{name}' is not a list of messages, as it is in other rows."
            )
        rows = [
            row._replace(values={**row.values, name: parsed[n]}) if n in parsed else row
            for n, row in enumerate(rows)
        ]
    return rows
