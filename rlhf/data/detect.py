"""Detect the layout of a source's columns, and convert its rows by the layout."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import Any

from jmespath.exceptions import JMESPathError
from jmespath.parser import ParsedResult

from rlhf.base.errors import DataError
from rlhf.base.packaged_yaml import read_yaml_beside
from rlhf.data.column_rules import (
    INTERPRETER,
    NONE_WANTED,
    Converted,
    Layout,
    Wanted,
    columns_read_by,
    find_first_values,
    parse_expressions,
)
from rlhf.data.layouts import SCORE_NAME_PARTS, is_blank
from rlhf.data.proposals import find_choices, find_families, propose, quote
from rlhf.data.records import Row
from rlhf.data.unread import Values, judge_words, summarize
from rlhf.data.written_lists import read_written_messages

TABLE = "columns.yaml"  # the layouts, and names of columns with a special meaning
# The overrides that read a data set by the expressions COLUMNS.
COMMAND = "data=local data.path=null data.sets.mine={path: FILE, columns: COLUMNS}"
PLAIN = re.compile(r"[\w./-]+\Z")  # values that Hydra's grammar needs no quotes for
UNCLEAR = "scores_or_ranks"  # target of numbers that may be scores or ranks; find_doubt refuses it
# Target -> parts of the names of columns that have a number for each response.
NAME_PARTS = {"ranks": ["rank"], "scores": SCORE_NAME_PARTS}
# Targets that are added to every layout but plain text, if rows have the columns.
ADDED_TARGETS = {"system": "system || system_prompt", "tools": "tools"}


@cache
def _read_names() -> Mapping[str, Any]:
    names: Mapping[str, Any] = read_yaml_beside(__file__, TABLE)
    return names


@cache
def read_layouts() -> Sequence[Layout]:
    """Return the known layouts, the most specific first."""
    layouts = []
    for name, row in _read_names()["layouts"].items():
        entry = dict(row)
        when = [_parse(text) for text in entry.pop("when", [])]
        optional, other = (frozenset(entry.pop(key, [])) for key in ("optional", "other"))
        refuse = entry.pop("refuse", "")
        del entry["source"]
        layouts.append(
            Layout(name, parse_expressions(entry, TABLE), "", optional, when, other, refuse)
        )
    return layouts


def _parse(text: str) -> ParsedResult:
    return parse_expressions({"": text}, TABLE)[""]


@cache
def known_columns() -> frozenset[str]:
    """Return the names of all columns that a known layout reads."""
    return frozenset(column for layout in read_layouts() for column in layout.columns)


def convert_rows(
    rows: Sequence[Row],
    *,
    source: str,
    keep: Wanted = NONE_WANTED,
    rules: Layout | None = None,
    command: str = COMMAND,
) -> Converted:
    """Convert rows to records by ``rules``, or by the layout that is detected.

    Raises:
        DataError: if ``detect_layout``, ``read_written_messages`` or ``Layout.convert`` raises it,
            or an unread column may change what is learned.
    """
    rows = read_written_messages(rows)
    layout = rules or detect_layout(rows, source=source, keep=keep, command=command)
    converted = layout.convert(rows, source=source, keep=keep)
    problem, more = find_doubt(layout, converted.unread)
    if problem:
        raise DataError(f"{source}: {problem}.\n{_build_advice(rows, command, layout, more)}")
    return converted


def detect_layout(
    rows: Sequence[Row], *, source: str, keep: Wanted = NONE_WANTED, command: str = COMMAND
) -> Layout:
    """Return the first known layout that fits ``rows``, with their system and grade columns.

    Raises:
        DataError: if no layout fits, or the layout that fits cannot be used.
    """
    typical = find_first_values(rows)
    layout = next((known for known in read_layouts() if not _find_missing(known, typical)), None)
    if layout is None or layout.refuse:
        problem = _describe_missing(typical)
        if layout is not None:
            problem = f"the layout '{layout.name}' cannot be used: {layout.refuse}."
        raise DataError(f"{source}: {problem}\n{_build_advice(rows, command)}")
    layout = layout._replace(expressions=_select_targets(layout, typical))
    present = [name for name, value in typical.items() if value is not None]
    unread = [name for name in present if name not in layout.columns and name not in keep]
    grades = _find_grades(layout, rows, unread)
    return layout._replace(expressions={**layout.expressions, **grades})


def _select_targets(layout: Layout, typical: Mapping[str, object]) -> dict[str, ParsedResult]:
    """Return the expressions of ``layout`` that read columns of ``typical``, and ADDED_TARGETS."""
    read = {
        target: expression
        for target, expression in layout.expressions.items()
        if typical.keys() & columns_read_by(expression)
    }
    if "text" not in read:
        for target, text in ADDED_TARGETS.items():
            if any(typical.get(name) is not None for name in text.split(" || ")):
                read.setdefault(target, _parse(text))
    return read


def _find_grades(
    layout: Layout, rows: Sequence[Row], unread: Sequence[str]
) -> dict[str, ParsedResult]:
    """Return the target and expression of an ``unread`` column that grades responses; {} if none.

    A column with a number for each of several responses is scores or ranks, according to its name,
    or UNCLEAR if its name does not show which, or if there are several such columns.
    """
    targets = layout.expressions.keys()
    if "responses" in targets and targets.isdisjoint({"scores", "ranks"}):
        responses = columns_read_by(layout.expressions["responses"])[0]
        grades = [name for name in unread if _grades_items(rows, responses, name)]
        words = grades[0].casefold() if len(grades) == 1 else ""
        kinds = [kind for kind, parts in NAME_PARTS.items() if any(part in words for part in parts)]
        target = kinds[0] if len(kinds) == 1 else UNCLEAR
    else:
        grades = [name for name in unread if name in _read_names()["grades"]]
        is_graded = not targets.isdisjoint({"rejected", "responses", "threads", "grade"})
        if is_graded or len(grades) > 1 or targets.isdisjoint({"chosen", "messages"}):
            return {}  # find_doubt refuses several grades of the only response
        target = "rank" if grades == ["rank"] else "grade"
    return {target: _parse(quote(grades[0]))} if grades else {}


def _grades_items(rows: Sequence[Row], column: str, name: str) -> bool:
    """Return True if ``name`` has a number or mark for each item of ``column``, in most rows."""
    pairs = [(row.values.get(column), row.values.get(name)) for row in rows]
    lists = [(a, b) for a, b in pairs if isinstance(a, list) and isinstance(b, list)]
    items = [item for a, b in lists if len(a) == len(b) for item in b]
    inner = [list(each.values()) if isinstance(each, dict) else [each] for each in items]
    values = summarize([value for each in inner for value in each])
    is_long = 2 * sum(len(a) == len(b) for a, b in lists) > len(rows)
    return is_long and bool(values.numbers or values.may_grade)


def find_doubt(
    layout: Layout, unread: Mapping[str, Values]
) -> tuple[str, Mapping[str, str] | None]:
    """Return why ``unread`` columns may change what ``layout`` learns, and targets that read them.

    The reason is "" if they do not, or if a user has named the columns. Unknown targets are None.
    """
    names, targets = _read_names(), layout.expressions.keys()
    if layout.key:
        return "", None
    if UNCLEAR in targets:
        why = "these may be scores of a row's responses (the highest is best) or ranks"
        rule = "(the lowest is best): name one as scores or as ranks"
        return f"{layout.expressions[UNCLEAR].expression}: {why} {rule}", {}
    answers = targets & {"chosen", "messages", "text", "responses"}
    is_compared = not targets.isdisjoint({"rejected", "scores", "ranks", "threads"})
    parts = [name for name in unread if name in names["content"]]
    if not parts and not is_compared:
        usual = names["grades"] if targets & {"chosen", "messages"} else ()
        marks = {
            name: values
            for name, values in unread.items()
            if name in usual or (values.may_grade and name not in layout.other)
        }
        if marks and answers and not targets & {"grade", "rank"}:
            name, values = next(iter(marks.items()))
            what = f"the column '{name}' ({values}) may say how good a response is"
            why = f"{what}, but nothing reads it"
            if targets & {"text", "responses"}:
                return f"{why}. To ignore it, use these columns", {}
            last = name.replace("[]", "[-1]") if "[]." in name else quote(name)
            more = {"grade": values.as_grade(last)}
            return f"{why}. If the column means something else, remove grade", more
        parts = _find_other_answers(layout, unread, has_answers=bool(answers))
    what = f"the column '{parts[0]}' is a part of the examples" if parts else ""
    return what and f"{what}, and the layout '{layout.name}' does not read it", None


def _find_other_answers(
    layout: Layout, unread: Mapping[str, Values], *, has_answers: bool
) -> list[str]:
    """Return the ``unread`` columns that may be answers, by their names and values."""
    texts = [name for name, values in unread.items() if values.words]
    names = {*layout.columns, *unread}
    naming = (values.different.keys() for values in unread.values() if values.varies)
    named = {name for words in naming if words <= names for name in words}
    parts = [name for name in texts if judge_words(name) < 0 or name in named]
    for family in find_families([*layout.columns, *texts]):
        if not has_answers or find_choices(unread, family):
            parts += [name for name in family if name in texts]
    if not has_answers:
        prose = [name for name in texts if unread[name].is_prose or unread[name].answers]
        parts += prose if prose[1:] or any(unread[name].answers for name in prose) else []
    return parts


def _find_missing(layout: Layout, typical: Mapping[str, object]) -> list[str]:
    """Return the columns and the conditions of ``layout`` that ``typical`` does not have."""
    missing = [name for name in layout.required if name not in typical]
    return missing or [rule.expression for rule in layout.when if not _holds(rule, typical)]


def _holds(condition: ParsedResult, typical: Mapping[str, object]) -> bool:
    try:
        value = INTERPRETER.visit(condition.parsed, typical)
    except JMESPathError:
        return False
    return value is not False and not is_blank(value)


# --------------------------------------------------------------------------------------- refusals


def _describe_missing(typical: Mapping[str, object]) -> str:
    """Return the message that no layout has the columns of ``typical``, with the nearest layout."""

    def share_present(layout: Layout) -> tuple[float, int]:
        present = sum(name in typical for name in layout.required)
        return present / len(layout.required), present

    nearest = max(read_layouts(), key=share_present)
    text = f"no known layout has the columns {', '.join(typical)}."
    if share_present(nearest)[1]:
        missing = ", ".join(_find_missing(nearest, typical))
        text += f" The nearest is {nearest.name}: {', '.join(nearest.required)} (no {missing})."
    return text


def _build_advice(
    rows: Sequence[Row],
    command: str,
    layout: Layout | None = None,
    more: Mapping[str, str] | None = None,
) -> str:
    """Return advice to read ``rows`` by ``layout`` and the targets ``more``, or else by a guess."""
    typical, whole = find_first_values(rows), [row.values for row in rows]
    if layout is not None and more is not None:
        missing = layout.optional - typical.keys()
        kept = ((t, _keep_columns(e.expression, missing)) for t, e in layout.expressions.items())
        read = dict([*kept, *more.items()])
    else:
        names = _read_names()
        columns = {name: summarize([row.get(name) for row in whole], whole) for name in typical}
        read = propose(columns, typical, asking=names["asking"], answering=names["answering"])
    said = ", ".join(f"{target}: {quote_for_hydra(each)}" for target, each in read.items())
    words, key, entry = command.partition("data.sets.")
    entry = key + entry.replace("COLUMNS", f"{{{said}}}")
    is_plain = {"'"} >= set(entry) & set("'\"\\$`")  # shells and shlex interpret the others
    typed = f'"{entry}"' if is_plain else shlex.quote(entry)
    return f"To say what to read (docs/data.md): {words}{typed}"


def _keep_columns(expression: str, missing: Iterable[str]) -> str:
    for name in missing:
        expression = re.sub(rf"\b{name}, |, {name}\b", "", expression)
    return expression


def quote_for_hydra(expression: str) -> str:
    """Return ``expression`` as a value in Hydra's grammar."""
    if PLAIN.match(expression):
        return expression
    if "'" not in expression:
        return f"'{expression}'"
    return '"{}"'.format(expression.replace('"', r"\""))
