"""Paths of columns (``answers.ja[0].text``), and comparisons of what is there."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

from rlhf.data.layouts import Row
from rlhf.errors import ConfigError

PATH = re.compile(r"[^\s.'\[\]]+(?:\.[^\s.'\[\]]+|\[\d+\])*")
STEP = re.compile(r"([^\s.'\[\]]+)|\[(\d+)\]")
MISSING: Final = object()


class ColumnPath(NamedTuple):
    """Names of columns and fields, and numbers of list items."""

    steps: tuple[str | int, ...]
    text: str

    def __str__(self) -> str:
        return self.text

    def exists(self, values: Mapping[str, object]) -> bool:
        """Whether ``values`` has the named fields, be they null; a list may be too short."""
        try:
            return self._walk(values) is not MISSING
        except TypeError:
            return True  # of another kind, which find() tells with its row

    def find(self, row: Row, key: str) -> object:
        """The value in ``row``; None where there is none.

        Raises:
            DataError: there is an object or a text on the way that cannot be entered like this.
        """
        try:
            value = self._walk(row.values)
        except TypeError as error:
            raise row.error(f"{key}: '{self}' does not fit: {error}.") from error
        return None if value is MISSING else value

    def _walk(self, value: object) -> object:
        for step in self.steps:
            if value is None:
                return None
            if isinstance(step, int):
                if not isinstance(value, list):
                    raise TypeError(f"[{step}] wants a list and meets {type(value).__name__}")
                value = value[step] if step < len(value) else None
            else:
                if not isinstance(value, Mapping):
                    raise TypeError(f"'{step}' wants an object and meets {type(value).__name__}")
                if step not in value:
                    return MISSING
                value = value[step]
        return value


def parse_path(text: str, *, key: str) -> ColumnPath:
    """The path that ``text`` names.

    Raises:
        ConfigError: it names none; says ``key``.
    """
    if not PATH.fullmatch(text):
        raise ConfigError(
            f"{key}={text}: it must be the path of a column, such as prompt, question.full_text "
            "or answers[0].text"
        )
    steps = (name or int(index) for name, index in STEP.findall(text))
    return ColumnPath(tuple(steps), text)


OPERATORS: dict[str, Callable[[Any, Any], bool]] = {
    "==": operator.eq,
    "!=": operator.ne,
    ">=": operator.ge,
    "<=": operator.le,
    ">": operator.gt,
    "<": operator.lt,
}
COMPARISON = re.compile(r"\s*([^\s=!<>]+)\s*(==|!=|>=|<=|>|<)\s*([^\s=!<>]+|'[^']*')\s*")


class Comparison(NamedTuple):
    """``left sign right``, where ``right`` is a column, a number or a quoted text."""

    left: ColumnPath
    sign: str
    right: ColumnPath | float | str

    def paths(self) -> list[ColumnPath]:
        """The columns that it reads."""
        return [self.left, *([self.right] if isinstance(self.right, ColumnPath) else [])]

    def holds(self, row: Row, key: str) -> bool | None:
        """Whether it holds in ``row``; None where one of the sides is null.

        Raises:
            DataError: a side is neither number nor text, or the two cannot be ordered.
        """
        other = self.right
        left = _comparable(self.left.find(row, key))
        right = _comparable(other.find(row, key) if isinstance(other, ColumnPath) else other)
        if left is None or right is None:
            return None
        is_ordered = self.sign not in {"==", "!="}
        both_numbers = isinstance(left, float) and isinstance(right, float)
        if not isinstance(left, float | str) or not isinstance(right, float | str):
            raise row.error(f"{key}: '{self.left}' and what it is compared with must be values.")
        if is_ordered and not both_numbers:
            raise row.error(f"{key}: {left!r} {self.sign} {right!r} orders what is no number.")
        return OPERATORS[self.sign](left, right)


def parse_comparison(text: str, *, key: str) -> Comparison:
    """The comparison that ``text`` is.

    Raises:
        ConfigError: it is none; says ``key``.
    """
    found = COMPARISON.fullmatch(text)
    if not found:
        raise ConfigError(
            f"{key}={text}: it must compare a column with a number, a quoted text or a column, "
            f"such as labels == 1, winner == 'model_a' or score_0 >= score_1; signs: "
            f"{', '.join(OPERATORS)}"
        )
    left, sign, right = found.groups()
    return Comparison(parse_path(left, key=key), sign, _operand(right, key))


def _operand(text: str, key: str) -> ColumnPath | float | str:
    if re.fullmatch("'.*'", text):
        return text[1:-1]
    number = _comparable(text)
    return number if isinstance(number, float) else parse_path(text, key=key)


def _comparable(value: object) -> object:
    """Numbers, also those in texts, as floats; a number that is none counts as null."""
    if isinstance(value, bool | int | float | str):
        try:
            number = float(value)
        except ValueError:
            return value
        return None if math.isnan(number) else number
    return value
