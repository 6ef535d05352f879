"""``data.sets.NAME.columns``: how the columns of a data set become those of a known layout.

Each key is a column to make, each value says from what: the path of a column, or a mapping of

    from     path of a column: ``prompt``, ``question.full_text``, ``answers.ja[0].text``
    if       a comparison; where it does not hold the text comes from the path in ``else``
    after    keep what follows the last occurrence of this text
    remove   delete whatever matches this regular expression
    turn     human: the text is what a human says in a conversation of one turn
    turns    the text is a conversation; which speaker each of its marks stands for

in this order, whatever order they are written in. A null, an empty text and an index behind the end
of a list make the part absent.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from rlhf.data.column_paths import ColumnPath, Comparison, parse_comparison, parse_path
from rlhf.data.detect import Converted, to_records
from rlhf.data.layouts import (
    LAYOUTS,
    PARTIAL,
    SPEAKERS,
    Layout,
    Message,
    Row,
    UnusableRowError,
    prompt_of,
)
from rlhf.errors import ConfigError, DataError

STEPS = ("from", "if", "else", "after", "remove", "turn", "turns")
TARGETS = {
    frozenset({"prompt"}): PARTIAL,
    frozenset({"prompt", "chosen"}): PARTIAL,
    frozenset({"prompt", "chosen", "rejected"}): PARTIAL,
    frozenset({"prompt", "responses"}): next(x for x in LAYOUTS if x.name == "ranking"),
    frozenset({"text"}): next(x for x in LAYOUTS if x.name == "language modelling"),
}


class ColumnRule(NamedTuple):
    """How one column is made; ``key`` is its place in the configuration."""

    key: str
    source: ColumnPath
    condition: Comparison | None = None
    otherwise: ColumnPath | None = None
    after: str | None = None
    remove: re.Pattern[str] | None = None
    turns: Mapping[str, str] | None = None
    """Mark -> role. Text before the first mark is the user's."""

    def paths(self) -> list[ColumnPath]:
        """Every column that it reads."""
        read = [self.source, *([self.otherwise] if self.otherwise else [])]
        return read + (self.condition.paths() if self.condition else [])

    def value(self, row: Row) -> object:
        """What the new column holds in ``row``; None: absent.

        Raises:
            UnusableRowError: a conversation does not end with its human.
            DataError: something is of the wrong type.
        """
        path = self.source
        if self.condition is not None:
            holds = self.condition.holds(row, self.key)
            if holds is None:
                return None
            path = self.source if holds else self.otherwise or self.source
        value = path.find(row, self.key)
        if not isinstance(value, str):
            self._check_other(row, path, value)
            return value
        text = self._mended(value)
        return text if text.strip() else None

    def _check_other(self, row: Row, path: ColumnPath, value: object) -> None:
        is_ranking = self.key.endswith(".responses") and isinstance(value, list)
        if value is not None and not is_ranking:
            kind = "a list of texts" if self.key.endswith(".responses") else "text"
            raise row.error(
                f"{self.key}: '{path}' is of type {type(value).__name__}; "
                f"it must be {kind} or null."
            )

    def _mended(self, text: str) -> str:
        if self.after is not None:
            text = text.rpartition(self.after)[2]
        if self.remove is not None:
            text = self.remove.sub("", text)
        return text if self.turns is None or not text.strip() else self._conversation(text)

    def _conversation(self, text: str) -> str:
        assert self.turns is not None
        marks = "|".join(map(re.escape, self.turns))
        pattern = rf"\s*(?<!\S)({marks}):\s*" if marks else "(?!)"
        first, *rest = re.split(pattern, text)
        messages = [Message("user", first.strip())] if first.strip() else []
        for mark, said in zip(rest[::2], rest[1::2], strict=True):
            messages.append(Message(self.turns[mark], said.strip()))
        if messages[-1] == Message("assistant", ""):  # the mark that asks for the answer
            messages.pop()
        return prompt_of(messages)


class ColumnRules(NamedTuple):
    """The rules of one data set, and the layout that they make."""

    rules: dict[str, ColumnRule]
    layout: Layout

    def convert(self, rows: Sequence[Row], *, source: str) -> Converted:
        """Records of ``rows``; what cannot be used is counted.

        Raises:
            DataError: a path that no row has, or a value of the wrong type.
        """
        for rule in self.rules.values():
            for path in rule.paths():
                if not any(path.exists(row.values) for row in rows):
                    columns = ", ".join(dict.fromkeys(name for row in rows for name in row.values))
                    raise DataError(
                        f"{source}: {rule.key} reads '{path}', which no row has; "
                        f"the columns are {columns}."
                    )
        made, unusable = [], []
        for row in rows:
            try:
                values = {name: rule.value(row) for name, rule in self.rules.items()}
                made.append(row._replace(values=values))
            except UnusableRowError as reason:
                unusable.append(str(reason))
        converted = to_records(made, source=source, layout=self.layout)
        converted.left_out.update(unusable)
        return converted


def parse_columns(columns: Mapping[str, Any], *, key: str) -> ColumnRules:
    """The rules that ``columns`` describes, the value of configuration key ``key``.

    Raises:
        ConfigError: they are none, or make no known layout.
    """
    layout = TARGETS.get(frozenset(columns))
    if layout is None:
        known = "; ".join(", ".join(names) for names in map(sorted, TARGETS))
        raise ConfigError(
            f"{key} makes {', '.join(map(str, columns)) or 'nothing'}: it must make one of these "
            f"and no others: {known}"
        )
    rules = {name: _parse_rule(value, f"{key}.{name}") for name, value in columns.items()}
    return ColumnRules(rules, layout)


def _parse_rule(value: object, key: str) -> ColumnRule:
    if isinstance(value, str):
        return ColumnRule(key, parse_path(value, key=key))
    if not isinstance(value, Mapping):
        raise ConfigError(f"{key}={value}: it must be the path of a column, or a mapping")
    for step, setting in value.items():
        if step not in STEPS:
            raise ConfigError(f"{key}.{step}: no such step; choose among {', '.join(STEPS)}")
        if step != "turns" and not (isinstance(setting, str) and setting):
            raise ConfigError(f"{key}.{step}={setting}: it must be text")
    if "from" not in value or ("if" in value) is not ("else" in value):
        raise ConfigError(f"{key}={dict(value)}: it needs 'from', and 'if' and 'else' together")
    turns = [step for step in ("turn", "turns") if step in value]
    if len(turns) > 1 or (turns and not key.endswith(".prompt")):
        raise ConfigError(f"{key} has {' and '.join(turns)}: one of the two, and for prompt only")
    has_branch = "if" in value
    return ColumnRule(
        key=key,
        source=parse_path(value["from"], key=f"{key}.from"),
        condition=parse_comparison(value["if"], key=f"{key}.if") if has_branch else None,
        otherwise=parse_path(value["else"], key=f"{key}.else") if has_branch else None,
        after=value.get("after"),
        remove=_parse_pattern(value["remove"], f"{key}.remove") if "remove" in value else None,
        turns=_parse_turns(value, key),
    )


def _parse_pattern(text: str, key: str) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except re.error as error:
        raise ConfigError(f"{key}={text}: not a regular expression ({error})") from error


def _parse_turns(value: Mapping[str, Any], key: str) -> dict[str, str] | None:
    if "turn" in value:
        if value["turn"] != "human":
            raise ConfigError(f"{key}.turn={value['turn']}: it must be human")
        return {}
    if "turns" not in value:
        return None
    roles = {name: role for role, name in SPEAKERS.items()}
    turns = value["turns"]
    if not (isinstance(turns, Mapping) and turns and all(s in roles for s in turns.values())):
        raise ConfigError(
            f"{key}.turns={turns}: it must map marks of the text to {', '.join(roles)}, "
            "such as {USER: Human, ASSISTANT: Assistant}"
        )
    return {str(mark): roles[speaker] for mark, speaker in turns.items()}
