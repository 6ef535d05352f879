"""Read config.yaml of a run directory, which somebody else may have written."""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum
from io import StringIO
from types import UnionType
from typing import Any, get_args

import yaml
from omegaconf import DictConfig, OmegaConf

MOST_CHARACTERS = 1_000_000  # a run with a hundred data sets writes fewer
DEEPEST = 12  # levels of mappings and lists
LARGEST = 2**63 - 1


def parse_plain_yaml(text: str) -> DictConfig:
    """Return the mapping in ``text``, which must contain only plain values, as runs write them.

    Aliases could expand a small file to any size, and interpolations could read the environment.

    Raises:
        ValueError: if ``text`` contains anything else.
        YAMLError, OmegaConfBaseException: if ``text`` cannot be parsed.
    """
    if len(text) > MOST_CHARACTERS:
        raise ValueError(f"it has more than {MOST_CHARACTERS} characters")
    depth = 0
    for event in yaml.parse(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)):
        if isinstance(event, yaml.AliasEvent):
            raise ValueError("it has an alias (*), and a run's own file has none")
        if (tag := getattr(event, "tag", None)) is not None:
            raise ValueError(f"it has a tag ({tag}), and a run's own file has none")
        depth += isinstance(event, yaml.CollectionStartEvent)
        depth -= isinstance(event, yaml.CollectionEndEvent)
        if depth > DEEPEST:
            raise ValueError(f"it has more than {DEEPEST} levels")
    found = OmegaConf.load(StringIO(text))
    if not isinstance(found, DictConfig) or "seed" not in found:
        raise ValueError("it has no keys of a run")
    for value in _iterate_values(OmegaConf.to_container(found, resolve=False)):
        if isinstance(value, str) and "${" in value:
            raise ValueError("it has an interpolation (${...}), and a run's own file has none")
        if isinstance(value, int) and abs(value) > LARGEST:
            raise ValueError("it has a whole number of more than 64 bits")
    return found


def _iterate_values(node: Any) -> Iterator[Any]:
    """Yield the names and values of ``node`` at any depth."""
    if isinstance(node, dict):
        for name, value in node.items():
            yield name
            yield from _iterate_values(value)
    elif isinstance(node, list):
        for value in node:
            yield from _iterate_values(value)
    else:
        yield node


def matches_schema_type(value: Any, kind: Any) -> bool:
    """Return True if ``value``, read from a file, may be a value of the schema's type ``kind``."""
    if kind is Any:  # such as data.path: one file or a list
        return True
    if isinstance(kind, UnionType):
        return any(matches_schema_type(value, each) for each in get_args(kind))
    if kind in {bool, str, type(None)}:
        return isinstance(value, kind)
    if kind in {int, float}:
        return isinstance(value, (int, kind)) and not isinstance(value, bool)
    if isinstance(kind, type) and issubclass(kind, Enum):
        return isinstance(value, str)
    return isinstance(value, dict | list) or value is None
