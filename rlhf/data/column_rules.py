"""Convert rows to a known layout by JMESPath expressions in ``data.sets.NAME.columns``.

Every value of ``columns`` is a JMESPath expression (https://jmespath.org) on one row, such as
``answers[0].text``. ``TextFunctions`` adds functions on texts to those of JMESPath.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from jmespath import Options, compile
from jmespath.functions import Functions, signature
from jmespath.parser import ParsedResult

from rlhf.base.errors import ConfigError, DataError
from rlhf.base.foreign_errors import translate_errors
from rlhf.data.detect import (
    NONE_WANTED,
    Converted,
    Wanted,
    select_columns,
    to_records,
    unread_columns,
)
from rlhf.data.layouts import LAYOUTS, PARTIAL, RANKING, SYSTEM, TOOLS, Layout
from rlhf.data.records import Row, UnusableRowError

# The sets of target columns that a user may define, and their layouts.
TARGETS = {
    frozenset({"prompt"}): PARTIAL,
    frozenset({"prompt", "chosen"}): PARTIAL,
    frozenset({"prompt", "chosen", "rejected"}): PARTIAL,
    frozenset({"prompt", "responses"}): RANKING,
    frozenset({"text"}): next(x for x in LAYOUTS if x.name == "language modelling"),
}
LONGEST = 1000  # maximum characters of an expression; a longer one could exceed the recursion limit
# Types of an argument, as JMESPath names them; [] stands for all types.
TEXT: Any = {"types": ["string"]}
NULLABLE: Any = {"types": ["string", "null"]}
ANY: Any = {"types": []}


class TextFunctions(Functions):
    """JMESPath's functions, and this project's functions on texts; these return null for null."""

    @signature({"types": ["boolean", "null"]}, ANY, ANY)
    def _func_pick(self, condition: bool | None, yes: object, no: object) -> object:
        """Return ``yes`` if the condition holds, otherwise ``no``."""
        if condition is None:
            return None
        return yes if condition else no

    @signature(NULLABLE, TEXT)
    def _func_after(self, text: str | None, mark: str) -> str | None:
        """Return the text after the last ``mark``, or the whole text if it has no ``mark``."""
        return text and text.rpartition(mark)[2]

    @signature(NULLABLE, TEXT)
    def _func_remove(self, text: str | None, pattern: str) -> str | None:
        """Return the text without the matches of a regular expression."""
        return text and re.sub(pattern, "", text)

    @signature(NULLABLE)
    def _func_human(self, text: str | None) -> list[object] | None:
        """Return the messages of a prompt: one message of the user, with the text."""
        return [_make_turn("user", text)] if text and text.strip() else None

    @signature(NULLABLE, TEXT, TEXT)
    def _func_conversation(
        self, text: str | None, human: str, assistant: str
    ) -> list[object] | None:
        """Return the messages of a text in which ``human:`` and ``assistant:`` begin the turns.

        Text before the first of these words is a message from the user.
        """
        if not text or not text.strip():
            return None
        roles = {human: "user", assistant: "assistant"}
        marks = "|".join(map(re.escape, roles))
        first, *rest = re.split(rf"\s*(?<!\S)({marks}):\s*", text)
        messages: list[object] = [_make_turn("user", first)] if first.strip() else []
        for mark, content in zip(rest[::2], rest[1::2], strict=True):
            messages.append(_make_turn(roles[mark], content))
        if messages[-1] == _make_turn("assistant", ""):  # the text ends in ``assistant:``
            messages.pop()
        return messages


def _make_turn(role: str, text: str) -> dict[str, str]:
    return {"role": role, "content": text.strip()}


OPTIONS = Options(custom_functions=TextFunctions())


class ColumnRules(NamedTuple):
    """The expressions that compute a data set's target columns, and the layout of these columns."""

    key: str
    expressions: Mapping[str, ParsedResult]
    layout: Layout

    def convert(self, rows: Sequence[Row], *, source: str, keep: Wanted = NONE_WANTED) -> Converted:
        """Convert ``rows`` to records; drop and count rows that cannot be used.

        Each record also gets the columns of its row that ``keep`` names.

        Raises:
            DataError: if an expression reads a column that no row has, is null in every row, fails
                on a row, or returns a value of the wrong type.
        """
        self._require_columns(rows, source)
        made, unusable = [], []
        for row in rows:
            try:
                values = {column: self._compute_column(row, column) for column in self.expressions}
                made.append(row._replace(values=select_columns(row, keep) | values))
            except UnusableRowError as reason:
                unusable.append(str(reason))
        for column, expression in self.expressions.items():
            if made and all(row.values[column] is None for row in made):
                raise DataError(
                    f"{source}: {self.key}.{column}={expression.expression} is null in every row."
                )
        converted = to_records(made, source=source, layout=self.layout, keep=keep)
        converted.left_out.update(unusable)
        read = {n for each in self.expressions.values() for n in _columns_read_by(each.parsed)}
        unread = unread_columns(rows, {*read, *keep})
        return converted._replace(unread=(*unread, *converted.unread))

    def _require_columns(self, rows: Sequence[Row], source: str) -> None:
        present = dict.fromkeys(name for row in rows for name in row.values)
        for column, expression in self.expressions.items():
            for name in _columns_read_by(expression.parsed):
                if name not in present:
                    raise DataError(
                        f"{source}: {self.key}.{column} reads '{name}', which no row has; "
                        f"the columns are {', '.join(present)}."
                    )

    def _compute_column(self, row: Row, column: str) -> object:
        with translate_errors(lambda reason: row.build_error(f"{self.key}.{column}: {reason}.")):
            value = self.expressions[column].search(row.values, options=OPTIONS)
        return None if isinstance(value, str) and not value.strip() else value


def parse_columns(columns: Mapping[str, str], *, key: str) -> ColumnRules:
    """Parse the expressions in ``columns``, the value of the configuration key ``key``.

    Raises:
        ConfigError: if the columns have no known layout, or a value is not an expression.
    """
    layout = TARGETS.get(frozenset(columns) - ({SYSTEM, TOOLS} if "prompt" in columns else set()))
    if layout is None:
        known = "; ".join(", ".join(names) for names in map(sorted, TARGETS))
        raise ConfigError(
            f"{key} has the columns {', '.join(map(str, columns)) or '(none)'}; "
            f"must have exactly one of these sets: {known} (with prompt also {SYSTEM}, {TOOLS})"
        )
    expressions = {
        column: _parse_expression(text, f"{key}.{column}") for column, text in columns.items()
    }
    return ColumnRules(key, expressions, layout)


def _parse_expression(text: str, key: str) -> ParsedResult:
    if len(text) > LONGEST:
        raise ConfigError(f"{key}: has {len(text):,} characters, and may have {LONGEST:,}")

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


def _columns_read_by(node: Mapping[str, Any]) -> Iterator[str]:
    """Yield the names of the columns that a parsed expression reads."""
    if node["type"] == "field":
        yield node["value"]
    elif node["type"].endswith(("subexpression", "index_expression", "projection", "pipe")):
        yield from _columns_read_by(node["children"][0])  # only this child reads the row
    elif node["type"] != "expref":  # an expref reads items of a list, not columns
        for child in node["children"]:
            yield from _columns_read_by(child)


def _functions_called_by(node: Mapping[str, Any]) -> Iterator[str]:
    if node["type"] == "function_expression":
        yield node["value"]
    if node["type"] != "slice":  # its children are numbers
        for child in node["children"]:
            yield from _functions_called_by(child)
