"""Give a composed or stored configuration the types of the schema, or explain its first error."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import is_dataclass
from enum import Enum
from functools import cache, lru_cache
from io import StringIO
from types import UnionType
from typing import Any, get_args

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigKeyError, InterpolationResolutionError, OmegaConfBaseException

from rlhf.base.errors import ConfigError
from rlhf.config.hydra_errors import (
    describe_type,
    did_you_mean,
    interpolation_error,
    schema_types,
    shorten,
    type_of_key,
    unknown_key_error,
)
from rlhf.config.schema.keys import format_value
from rlhf.config.schema.run import RunConfig

# Limits of the config.yaml of a run directory, which somebody else may have written.
MOST_CHARACTERS = 1_000_000  # a run with a hundred data sets writes fewer
DEEPEST = 12  # levels of mappings and lists
LARGEST = 2**63 - 1


def merge_into_schema(cfg: DictConfig) -> DictConfig:
    """Return ``cfg`` merged into the schema; mandatory values may still be missing.

    Raises:
        ConfigError: if a value has the wrong type. OmegaConf accepts any number as true or false:
            only 0 and 1 are accepted here.
    """
    try:
        for key in (key for key, kind in schema_types().items() if kind is bool):
            if isinstance(value := OmegaConf.select(cfg, key), int | float) and value not in (0, 1):
                raise ConfigError(f"{key}={value}: expected true or false")
        # The filled schema would add missing groups: use it only if every group is a mapping.
        nodes = [cfg._get_node(key, validate_access=False) for key in _group_types()]
        is_whole = all(isinstance(n, DictConfig) and isinstance(n._content, dict) for n in nodes)
        schema = _filled_schema() if is_whole else OmegaConf.structured(RunConfig)
        merged = OmegaConf.merge(schema, cfg)
    except OmegaConfBaseException as error:
        raise schema_error(error) from error
    assert isinstance(merged, DictConfig)
    return merged


@cache
def _group_types() -> dict[str, Any]:
    """Return the top-level groups of keys and their dataclasses."""
    types = schema_types()
    return {key: types[key] for key in types if is_dataclass(types[key]) and "." not in key}


@cache
def _filled_schema() -> DictConfig:
    """Return the schema with every group filled in, which makes later merges faster."""
    schema = OmegaConf.structured(RunConfig)
    for key, kind in _group_types().items():
        OmegaConf.update(schema, key, OmegaConf.structured(kind))
    assert isinstance(schema, DictConfig)
    return schema


def schema_error(error: OmegaConfBaseException) -> ConfigError:
    """Return our own error for a value or key that does not match the schema."""
    key = re.sub(r"\[\d+\]", "", error.full_key or "")
    if isinstance(error, ConfigKeyError):
        return unknown_key_error(key)
    if isinstance(error, InterpolationResolutionError):
        return interpolation_error(error)
    reason = (error.msg or str(error)).partition("\n")[0]
    value = shorten(format_value(error.value))
    try:
        kind = type_of_key(key)
    except KeyError:  # the error of OmegaConf does not name the mapping's entry
        return ConfigError(f"{key}={value}: {reason}")
    hint = did_you_mean(value, getattr(kind, "__members__", ()))
    if key == "reward_model":
        hint = f"; an option of the group is chosen with model@reward_model={value}"
    return ConfigError(f"{key}={value}: expected {describe_type(kind)}{hint}")


@lru_cache(maxsize=4)  # a run parses its file a dozen times; callers do not change it
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
    for value in _iterate_names_and_values(OmegaConf.to_container(found, resolve=False)):
        if isinstance(value, str) and "${" in value:
            raise ValueError("it has an interpolation (${...}), and a run's own file has none")
        if isinstance(value, int) and abs(value) > LARGEST:
            raise ValueError("it has a whole number of more than 64 bits")
    return found


def _iterate_names_and_values(node: Any) -> Iterator[Any]:
    """Yield all names and values of nested mappings and lists."""
    if isinstance(node, dict):
        for name, value in node.items():
            yield name
            yield from _iterate_names_and_values(value)
    elif isinstance(node, list):
        for value in node:
            yield from _iterate_names_and_values(value)
    else:
        yield node


def matches_schema_type(value: Any, kind: Any) -> bool:
    """Return True if ``value``, read from a file, may be a value of the schema's type ``kind``."""
    if kind is Any:  # such as data.path, a file or a list of files
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
