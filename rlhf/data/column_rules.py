"""Compute the targets of a layout (``layouts.py``) from rows, by JMESPath expressions.

Each target has an expression (https://jmespath.org) on one row, such as ``answers[0].text``.
``TextFunctions`` adds functions on texts to those of JMESPath. ``columns.yaml`` has the expressions
of known layouts, and ``data.sets.NAME.columns`` those of a user.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from jmespath import Options, compile
from jmespath.exceptions import JMESPathTypeError
from jmespath.functions import Functions, signature
from jmespath.parser import ParsedResult
from jmespath.visitor import TreeInterpreter

from rlhf.base.errors import ConfigError, DataError
from rlhf.base.foreign_errors import translate_errors
from rlhf.data.layouts import (
    SCORES,
    count_conflicts,
    expand_threads,
    is_blank,
    pair_rivals,
    read_marks,
    read_records,
)
from rlhf.data.records import (
    MESSAGE_KEYS,
    ROLES,
    TEXT_OF,
    Dropped,
    OddRowError,
    Record,
    Row,
    UnusableRowError,
    join_dropped,
)
from rlhf.data.unread import Values, summarize

Wanted = Mapping[str, str]  # data columns that rewards read -> the config key that names the column
NONE_WANTED: Wanted = {}
# The sets of targets that a user may define; beside prompt or messages, also system and tools.
TARGETS = (
    "prompt; chosen, prompt; chosen, grade, prompt; chosen, prompt, rejected; "
    "prompt, responses; prompt, responses, scores; prompt, ranks, responses; "
    "chosen, rejected; messages; grade, messages; text"
).split("; ")
MOST_CHARACTERS = 1000  # in an expression; a longer one could exceed the recursion limit
# Types of an argument, as JMESPath names them; [] stands for all types.
TEXT: Any = {"types": ["string"]}
NULLABLE: Any = {"types": ["string", "null"]}
NULLABLE_LIST: Any = {"types": ["array", "null"]}
ANY: Any = {"types": []}
NESTED = (list, dict)


class TextFunctions(Functions):
    """JMESPath's functions, and this project's, which return null (``turns``: []) for null."""

    @signature({"types": ["boolean", "null"]}, ANY, ANY)
    def _func_pick(self, condition: bool | None, yes: object, no: object) -> object:
        if condition is None:
            return None
        return yes if condition else no

    @signature(NULLABLE, TEXT)
    def _func_after(self, text: str | None, mark: str) -> str | None:
        """Return the text after the last ``mark``, or the whole text if it has no ``mark``."""
        return text and text.rpartition(mark)[2]

    @signature(NULLABLE, TEXT)
    def _func_remove(self, text: str | None, pattern: str) -> str | None:
        return text and re.sub(pattern, "", text)

    @signature(NULLABLE)
    def _func_human(self, text: str | None) -> list[object] | None:
        """Return the messages of a prompt: one message of the user, with the text."""
        return [_make_turn("user", text)] if text and text.strip() else None

    @signature(NULLABLE | {"variadic": True})
    def _func_lines(self, *texts: Any) -> str | None:
        """Return the texts that are not blank, each on a line of its own; null if all are blank."""
        for text in texts:  # jmespath checks the first one only
            if not isinstance(text, str | None):
                raise JMESPathTypeError("lines", text, type(text).__name__, NULLABLE["types"])
        return "\n".join(text for text in texts if not is_blank(text)) or None

    @signature(NULLABLE_LIST)
    def _func_turns(self, pairs: list[object] | None) -> list[object] | None:
        """Return the messages of [request, answer] pairs, without those that are blank."""
        spoken = (
            zip(("user", "assistant"), pair, strict=False)
            for pair in pairs or ()
            if isinstance(pair, list)
        )
        return [
            {"role": role, "content": text}
            for turns in spoken
            for role, text in turns
            if not is_blank(text)
        ]

    @signature(NULLABLE, TEXT, TEXT)
    def _func_conversation(
        self, text: str | None, human: str, assistant: str
    ) -> list[object] | None:
        """Return the messages of a text in which ``human:`` and ``assistant:`` begin the turns.

        A mark that is a word must have a colon after it; a mark such as ``<user>`` need not. Text
        before the first mark is a message from the user.
        """
        if not text or not text.strip():
            return None
        roles = {human: "user", assistant: "assistant"}
        marks = "|".join(
            rf"(?<!\S){re.escape(mark)}(?=:)" if mark[:1].isalnum() else re.escape(mark)
            for mark in roles
        )
        before, *rest = re.split(rf"\s*({marks}):?\s*", text)
        messages: list[object] = [_make_turn("user", before)] if before.strip() else []
        for mark, content in zip(rest[::2], rest[1::2], strict=True):
            messages.append(_make_turn(roles[mark], content))
        if messages[-1] == _make_turn("assistant", ""):  # the text ends in ``assistant:``
            messages.pop()
        return messages


def _make_turn(role: str, text: str) -> dict[str, str]:
    return {"role": role, "content": text.strip()}


# One interpreter for all rows, since each new interpreter must look up its methods again.
INTERPRETER = TreeInterpreter(Options(custom_functions=TextFunctions()))


class Converted(NamedTuple):
    """The records of one source, the layout of its rows, and its dropped rows counted by reason."""

    records: Sequence[Record]
    layout: str
    left_out: Dropped
    read: tuple[str, ...] = ()
    """Columns that hold values and are read."""
    unread: Mapping[str, Values] = {}
    """Columns and keys of messages that hold values and are not read."""
    conflicts: Dropped = Dropped()
    """Used rows whose columns contradict each other, counted by how."""


class Layout(NamedTuple):
    """The expressions that compute the targets of a row; ``key`` is the user's key, or ""."""

    name: str
    expressions: Mapping[str, ParsedResult]
    key: str = ""
    optional: frozenset[str] = frozenset()
    """Columns that rows may lack."""
    when: Sequence[ParsedResult] = ()
    """Expressions that are neither null nor false in a row of this layout."""
    other: frozenset[str] = frozenset()
    """Columns and keys of messages that are known to be no grades, whatever their values."""
    refuse: str = ""
    """Reason for which rows of this layout cannot be used."""

    @property
    def columns(self) -> dict[str, None]:
        """Return the columns that the expressions read, in their order."""
        return dict.fromkeys(
            name for expression in self.expressions.values() for name in columns_read_by(expression)
        )

    @property
    def required(self) -> list[str]:
        """Return the columns that rows must have."""
        return [name for name in self.columns if name not in self.optional]

    def convert(self, rows: Sequence[Row], *, source: str, keep: Wanted = NONE_WANTED) -> Converted:
        """Convert ``rows`` to records; drop and count rows that cannot be used.

        Each record also gets the columns of its row that ``keep`` names. Scored responses to the
        same prompt become pairs.

        Raises:
            DataError: if an expression of a user reads a column that no row has, or is null in
                every row; if an expression fails on a row, or returns a value of the wrong type;
                if most rows are malformed; if a column of ``keep`` is missing.
        """
        first_values = find_first_values(rows)
        present = [name for name, value in first_values.items() if value is not None]
        self._require_columns(first_values, source)
        records: list[Record] = []
        left_out, odd, conflicts = Dropped(), Dropped(), Dropped()
        faults: list[DataError] = []
        messages: defaultdict[str, list[object]] = defaultdict(list)
        nulls = set(self.expressions)
        for row, targets in self._compute_targets(rows):
            if nulls:
                nulls = {target for target in nulls if is_blank(targets.values.get(target))}
            for name, value in targets.values.items():
                if isinstance(value, NESTED) and name != "tools":
                    messages[name] += value if isinstance(value, list) else [value]
            try:
                new_records, tools = read_records(targets, left_out), targets.tools()
            except OddRowError as error:
                odd.drop(str(error), row.place)
                faults.append(error.fault)
                continue
            except UnusableRowError as reason:
                left_out.drop(str(reason), row.place)
                continue
            for record in new_records:
                columns = _select_columns(row, record, keep) if keep else None
                records.append(record._replace(columns=columns, place=row.place, tools=tools))
                if record.rejected:
                    count_conflicts(row, targets, record, conflicts)
        if 2 * len(faults) > len(rows):
            raise faults[0]
        left_out = join_dropped([left_out, odd])
        for target, expression in self.expressions.items():
            if self.key and target in nulls:
                rule = f"{self.key}.{target}={expression.expression}"
                raise DataError(f"{source}: {rule} is null in every row.")
        read_columns = tuple(name for name in self.columns if name in present)
        records = read_marks(records) if "grade" in self.expressions else records
        all_values = [row.values for row in rows]
        unread = {
            name: summarize([row.get(name) for row in all_values], all_values)
            for name in present
            if name not in self.columns and name not in keep
        }
        for name, items in messages.items():
            unread |= _summarize_keys(name, items)
        records = pair_rivals(records, left_out)
        return Converted(records, self.name, left_out, read_columns, unread, conflicts)

    def _compute_targets(self, rows: Sequence[Row]) -> Iterator[tuple[Row, Row]]:
        """Yield each row and its targets as a Row; for threads, once per question in the row.

        A blank text becomes null, unless a known layout's expression is only the column's name.
        """
        if "threads" in self.expressions:
            yield from expand_threads(rows)
            return
        known = {} if self.key else self.expressions
        plain = {t: e.parsed["value"] for t, e in known.items() if e.parsed["type"] == "field"}
        others = [target for target in self.expressions if target not in plain]
        for row in rows:
            values = {target: row.values.get(column) for target, column in plain.items()}
            for target in others:
                values[target] = self._compute(row, target)
            yield row, Row(row.file, row.number, values)

    def _require_columns(self, present: Mapping[str, object], source: str) -> None:
        for target, expression in self.expressions.items():
            for name in columns_read_by(expression):
                if self.key and name not in present:
                    raise DataError(
                        f"{source}: {self.key}.{target} reads '{name}', which no row has; "
                        f"the columns are {', '.join(present)}."
                    )

    def _compute(self, row: Row, target: str) -> object:
        place = f"{self.key}.{target}" if self.key else f"{target} of the layout {self.name}"
        with translate_errors(lambda reason: row.build_error(f"{place}: {reason}.")):
            value = INTERPRETER.visit(self.expressions[target].parsed, row.values)
        return None if isinstance(value, str) and is_blank(value) else value


def find_first_values(rows: Iterable[Row]) -> dict[str, object]:
    """Return, for each column, the first value that is not blank; None if all are blank."""
    first_values: dict[str, object] = {}
    has_all = False
    for row in rows:
        if has_all and first_values.keys() >= row.values.keys():
            continue
        for name, value in row.values.items():
            if first_values.get(name) is None:
                first_values[str(name)] = None if is_blank(value) else value
        has_all = all(value is not None for value in first_values.values())
    return first_values


def _summarize_keys(column: str, items: Sequence[object]) -> dict[str, Values]:
    """Summarize the values of unread keys of messages; a key that an answer lacks is blank."""
    messages = [item for item in items if isinstance(item, dict)]
    keys = dict.fromkeys(key for item in messages for key in item if key not in MESSAGE_KEYS)
    summaries = {
        f"{column}[].{key}": summarize(
            [item.get(key) for item in messages if key in item or _is_answer(item)]
        )
        for key in keys
    }
    return {name: values for name, values in summaries.items() if values.total}


def _is_answer(item: Mapping[str, object]) -> bool:
    roles = (item.get(key) for key in TEXT_OF)
    return any(isinstance(role, str) and ROLES.get(role) == "assistant" for role in roles)


def _select_columns(row: Row, record: Record, keep: Wanted) -> dict[str, Any]:
    """Return the columns that ``keep`` names, from a row or from the scores of its ``record``.

    A name with dots that is no column is the path of a field: ``reward_model.ground_truth``.

    Raises:
        DataError: if a column is missing; the message has the configuration key that names it.
    """
    is_scored = isinstance(record.grade, float)  # pair_rivals makes its scores
    whole = {**(dict.fromkeys(SCORES) if is_scored else record.columns or {}), **row.values}
    selected: dict[str, Any] = dict.fromkeys(keep, whole)
    for name, key in keep.items():
        for part in [name] if name in whole else name.split("."):
            if not isinstance(selected[name], dict) or part not in selected[name]:
                raise row.build_error(
                    f"column '{name}' is missing; {key} names it. The row has "
                    f"{', '.join(map(repr, row.values))}."
                )
            selected[name] = selected[name][part]
    return selected


def parse_columns(columns: Mapping[str, str], *, key: str) -> Layout:
    """Parse the expressions in ``columns``, the value of the configuration key ``key``.

    Raises:
        ConfigError: if the names are not one of ``TARGETS``, or a value is not an expression.
    """
    addable = {"system", "tools"} if {"prompt", "messages"} & columns.keys() else set()
    known = "; ".join(TARGETS)
    if ", ".join(sorted(map(str, columns.keys() - addable))) not in TARGETS:
        raise ConfigError(
            f"{key} has the columns {', '.join(map(str, columns)) or '(none)'}; must have exactly "
            f"one of these sets: {known}; system and tools may be added alongside prompt or "
            "messages"
        )
    return Layout("columns", parse_expressions(columns, key), key)


def parse_expressions(columns: Mapping[str, str], key: str) -> dict[str, ParsedResult]:
    """Parse the expression of each column; raise a ConfigError if one is invalid."""
    return {name: _parse_expression(text, f"{key}.{name}") for name, text in columns.items()}


def _parse_expression(text: str, key: str) -> ParsedResult:
    if len(text) > MOST_CHARACTERS:
        raise ConfigError(f"{key}: has {len(text):,} characters; the limit is {MOST_CHARACTERS:,}")

    def build_parse_error(reason: str) -> ConfigError:
        return ConfigError(
            f"{key}={text}: not a JMESPath expression ({reason}). Examples: "
            "question, answers[0].text, pick(score_0 >= score_1, answer_0, answer_1). Put names "
            'with characters other than letters, digits and _ in double quotes: "my column"'
        )

    with translate_errors(build_parse_error):
        expression = compile(text)
    for name in _functions_called_by(expression.parsed):
        if name not in TextFunctions.FUNCTION_TABLE:
            known = ", ".join(sorted(TextFunctions.FUNCTION_TABLE))
            raise ConfigError(f"{key}={text}: no function {name}; choose one of {known}")
    return expression


def columns_read_by(expression: ParsedResult) -> list[str]:
    """Return the names of the columns that an expression reads."""
    return list(_iterate_columns(expression.parsed))


def _iterate_columns(node: Mapping[str, Any]) -> Iterator[str]:
    if node["type"] == "field":
        yield node["value"]
    elif node["type"].endswith(("subexpression", "index_expression", "projection", "pipe")):
        yield from _iterate_columns(node["children"][0])  # only this child reads the row
    elif node["type"] != "expref":  # an expref reads items of a list, not columns
        for child in node["children"]:
            yield from _iterate_columns(child)


def _functions_called_by(node: Mapping[str, Any]) -> Iterator[str]:
    if node["type"] == "function_expression":
        yield node["value"]
    if node["type"] != "slice":  # its children are numbers
        for child in node["children"]:
            yield from _functions_called_by(child)
