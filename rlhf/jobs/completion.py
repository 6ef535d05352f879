"""Tab completion of values: Hydra completes keys and the options of groups, but not values.

Hydra allows one completion plugin per shell and has its own. This code therefore runs before Hydra.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from enum import Enum
from pathlib import Path
from types import NoneType
from typing import Any, get_args

from rlhf.config.hydra_errors import type_of_key


def complete_value(words: Sequence[str], environment: Mapping[str, str], sweeps: Path) -> None:
    """Print the possible values of the last word of the shell's line and exit, if there are any.

    ``words`` are the arguments of this command. Otherwise return, so that Hydra completes the line.
    """
    if not any(word.startswith("query=") for word in words) or "COMP_LINE" not in environment:
        return
    if choices := value_choices(environment["COMP_LINE"], sweeps):
        sys.stdout.write("\n".join(choices) + "\n")
        sys.exit(0)


def value_choices(line: str, sweeps: Path) -> list[str]:
    """Return the completions of the last word, KEY=START, of ``line``; [] if it is free text."""
    key, equals, start = line.rpartition(" ")[2].partition("=")
    name = key.lstrip("+")
    if not equals:
        return []
    if name == "sweep":
        values = sorted(file.stem for file in sweeps.glob("*.yaml"))
    else:
        try:
            values = _values_of_type(type_of_key(name))
        except KeyError:
            return []
    return [f"{key}={value}" for value in values if value.startswith(start)]


def _values_of_type(kind: Any) -> list[str]:
    """Return all values of a type made of enumerations, bool and None; [] for other types."""
    kinds = get_args(kind) or (kind,)
    if not all(each in (bool, NoneType) or _is_enum(each) for each in kinds):
        return []
    words = {bool: ["true", "false"], NoneType: ["null"]}
    return [word for each in kinds for word in (words.get(each) or list(each.__members__))]


def _is_enum(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, Enum)
