"""Detect the column layout of a source."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from jmespath.exceptions import JMESPathError
from jmespath.parser import ParsedResult

from rlhf.base.errors import DataError
from rlhf.base.packaged_yaml import read_yaml_beside
from rlhf.data.column_rules import (
    INTERPRETER,
    NONE_WANTED,
    Layout,
    Wanted,
    columns_read_by,
    find_first_values,
    parse_expressions,
)
from rlhf.data.layouts import is_blank
from rlhf.data.records import TEXT_OF, Row

TABLE = "columns.yaml"  # the layouts, and names of columns with a special meaning
NAME = re.compile(r"[A-Za-z_]\w*\Z")  # names that an expression needs no quotes for
PLAIN_PATH = re.compile(r"[\w./-]+\Z")
PAIRS = {"rejected", "responses", "threads"}  # targets of layouts with several responses
# Targets of every layout with a prompt.
ADDED = {"system": "system || system_prompt", "tools": "tools"}


@cache
def _read_names() -> Mapping[str, Any]:
    names: Mapping[str, Any] = read_yaml_beside(__file__, TABLE)
    return names


@cache
def read_layouts() -> Sequence[Layout]:
    """Return the known layouts, the most specific first."""
    found = []
    for name, row in _read_names()["layouts"].items():
        given = dict(row)
        when = [_parse(text) for text in given.pop("when", [])]
        optional, refuse = frozenset(given.pop("optional", [])), given.pop("refuse", "")
        del given["source"]
        found.append(Layout(name, parse_expressions(given, TABLE), "", optional, when, refuse))
    return found


def _parse(text: str) -> ParsedResult:
    return parse_expressions({"": text}, TABLE)[""]


@cache
def known_columns() -> frozenset[str]:
    """Return the names of all columns that a known layout reads."""
    return frozenset(column for layout in read_layouts() for column in layout.columns)


def detect_layout(rows: Sequence[Row], *, source: str, keep: Wanted = NONE_WANTED) -> Layout:
    """Return the first known layout that fits ``rows``, with their system and grade columns.

    Raises:
        DataError: if no layout fits, or one fits that cannot be used, or a column that the layout
            does not read (and that is not in ``keep``) is a part of the examples.
    """
    typical = find_first_values(rows)
    layout = next((each for each in read_layouts() if not _find_missing(each, typical)), None)
    if layout is None:
        raise DataError(_build_refusal(source, typical))
    layout = layout._replace(expressions=_select_targets(layout, typical))
    present = [name for name, value in typical.items() if value is not None]
    unread = [name for name in present if name not in layout.columns and name not in keep]
    grades = _find_grades(layout, unread)
    if problem := _find_problem(layout, unread, grades):
        raise DataError(f"{source}: {problem}.\n{_build_advice(source, typical, grades)}")
    marks = {"rank" if name == "rank" else "grade": _parse(name) for name in grades}
    return layout._replace(expressions={**layout.expressions, **marks})


def _select_targets(layout: Layout, typical: Mapping[str, object]) -> dict[str, ParsedResult]:
    """Return the expressions of ``layout`` that read columns of ``typical``, and those of ADDED."""
    read = {
        target: expression
        for target, expression in layout.expressions.items()
        if typical.keys() & columns_read_by(expression)
    }
    if "text" not in read:
        for target, text in ADDED.items():
            if any(typical.get(name) is not None for name in text.split(" || ")):
                read.setdefault(target, _parse(text))
    return read


def _find_grades(layout: Layout, unread: Sequence[str]) -> list[str]:
    """Return the ``unread`` columns that grade the only response of ``layout``."""
    targets = layout.expressions.keys()
    if PAIRS & targets or "grade" in targets or not {"chosen", "messages"} & targets:
        return []
    return [name for name in unread if name in _read_names()["grades"]]


def _find_problem(layout: Layout, unread: Sequence[str], grades: Sequence[str]) -> str:
    """Return why rows of ``layout`` with the ``unread`` columns are refused; "" if they are not."""
    if layout.refuse:
        return f"the layout '{layout.name}' cannot be used: {layout.refuse}"
    if len(grades) > 1:
        return f"the columns {' and '.join(grades)} grade the same response: choose one"
    names = _read_names()
    parts = names["content"] + ([] if PAIRS & layout.expressions.keys() else names["responses"])
    for name in unread:
        if name in parts:
            return (
                f"the column '{name}' is a part of the examples, and the layout "
                f"'{layout.name}' does not read it. Remove the column"
            )
    return ""


def _find_missing(layout: Layout, typical: Mapping[str, object]) -> list[str]:
    """Return the columns and the conditions of ``layout`` that ``typical`` does not have."""
    missing = [name for name in layout.required if name not in typical]
    return missing or [each.expression for each in layout.when if not _holds(each, typical)]


def _holds(condition: ParsedResult, typical: Mapping[str, object]) -> bool:
    try:
        value = INTERPRETER.visit(condition.parsed, typical)
    except JMESPathError:
        return False
    return value is not False and not is_blank(value)


# --------------------------------------------------------------------------------------- refusals


def _build_refusal(source: str, typical: Mapping[str, object]) -> str:
    def share_present(layout: Layout) -> tuple[float, int]:
        present = sum(name in typical for name in layout.required)
        return present / len(layout.required), present

    nearest = max(read_layouts(), key=share_present)
    text = f"{source}: no known layout has the columns {', '.join(typical)}."
    if share_present(nearest)[1]:
        missing = ", ".join(_find_missing(nearest, typical))
        text += f" The nearest is {nearest.name}: {', '.join(nearest.required)} (no {missing})."
    return f"{text}\n{_build_advice(source, typical)}"


def _are_turns(value: object) -> bool:
    items = value if isinstance(value, list) else []
    return bool(items) and all(
        isinstance(i, dict) and not TEXT_OF.keys().isdisjoint(i) for i in items
    )


def _build_advice(source: str, typical: Mapping[str, object], grades: Sequence[str] = ()) -> str:
    """Return the line to type for rows like ``typical``, with columns guessed by their names."""
    texts = [name for name, value in typical.items() if isinstance(value, str) and NAME.match(name)]
    names = _read_names()
    order = [*names["asking"], *(name for name in texts if name not in names["answering"])]
    asking = next((name for name in order if name in texts), "QUESTION")
    order = [*names["answering"], *texts]
    answer = next((name for name in order if name in texts and name != asking), "ANSWER")
    columns = {"prompt": f"'human({asking})'", "chosen": answer}
    if turns := next((name for name, value in typical.items() if _are_turns(value)), None):
        columns = {"messages": turns}
    columns |= dict(zip(["grade"], grades, strict=False))
    path = source.partition(", split ")[0]
    place = path if PLAIN_PATH.match(path) else f"'{path}'"
    said = ", ".join(f"{target}: {expression}" for target, expression in columns.items())
    return (
        "To say what to read (docs/data.md): data.path=null "
        f'"data.sets.mine={{path: {place}, columns: {{{said}}}}}"'
    )
