"""Tab completion of values: Hydra completes keys and the options of groups, but not values.

Hydra allows one completion plugin for each shell and brings its own, so values come before it.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from enum import Enum
from pathlib import Path
from types import NoneType
from typing import Any, get_args

from rlhf.config.hydra_errors import type_of


def complete_value(words: Sequence[str], environment: Mapping[str, str], sweeps: Path) -> None:
    """Print the choices of the value at the end of the shell's line, and exit, if there are any.

    ``words`` are the command's. Other lines are left to Hydra.
    """
    if not any(word.startswith("query=") for word in words) or "COMP_LINE" not in environment:
        return
    if choices := value_choices(environment["COMP_LINE"], sweeps):
        sys.stdout.write("\n".join(choices) + "\n")
        sys.exit(0)


def value_choices(line: str, sweeps: Path) -> list[str]:
    """Return what the last word of ``line`` can become if it is KEY=START; [] if that is open."""
    key, equals, start = line.rpartition(" ")[2].partition("=")
    name = key.lstrip("+")
    if not equals:
        return []
    if name == "sweep":
        values = sorted(file.stem for file in sweeps.glob("*.yaml"))
    else:
        try:
            values = _values(type_of(name))
        except KeyError:
            return []
    return [f"{key}={value}" for value in values if value.startswith(start)]


def _values(kind: Any) -> list[str]:
    """Return all values of an enumeration, a bool, or null beside them; [] for other types."""
    kinds = get_args(kind) or (kind,)
    if not all(each in (bool, NoneType) or _is_enum(each) for each in kinds):
        return []
    words = {bool: ["true", "false"], NoneType: ["null"]}
    return [word for each in kinds for word in (words.get(each) or list(each.__members__))]


def _is_enum(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, Enum)
