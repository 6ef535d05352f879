"""Convert a composed configuration to the types of the schema, or explain its first error."""

from __future__ import annotations

import re
from dataclasses import is_dataclass
from functools import cache
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import (
    ConfigKeyError,
    InterpolationResolutionError,
    OmegaConfBaseException,
)

from rlhf.base.errors import ConfigError
from rlhf.config.hydra_errors import (
    describe_type,
    did_you_mean,
    schema_types,
    type_of_key,
    unknown_key_error,
)
from rlhf.config.schema.run import RunConfig


def merge_into_schema(cfg: DictConfig) -> DictConfig:
    """Return ``cfg`` merged into the schema; values may still be missing.

    Raises:
        ConfigError: if a value has the wrong type, also a number other than 0 or 1 instead of true
            or false, which OmegaConf would accept.
    """
    try:
        for key in (key for key, kind in schema_types().items() if kind is bool):
            if isinstance(value := OmegaConf.select(cfg, key), int | float) and value not in (0, 1):
                raise ConfigError(f"{key}={value}: expected true or false")
        # A group that is missing, an interpolation or not a mapping must not be filled in here.
        nodes = [cfg._get_node(key, validate_access=False) for key in _group_types()]
        is_whole = all(isinstance(n, DictConfig) and isinstance(n._content, dict) for n in nodes)
        schema = _schema_with_groups() if is_whole else OmegaConf.structured(RunConfig)
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
def _schema_with_groups() -> DictConfig:
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
    reason = (error.msg or str(error)).partition("\n")[0]
    if isinstance(error, InterpolationResolutionError):
        return ConfigError(f"{key}: {reason}")
    value = format_value(error.value)
    try:
        kind = type_of_key(key)
    except KeyError:  # OmegaConf does not say in which entry of a mapping the key lies
        return ConfigError(f"{key}={value}: {reason}")
    hint = did_you_mean(value, getattr(kind, "__members__", ()))
    if key == "reward_model":
        hint = f"; an option of the group is chosen with model@reward_model={value}"
    return ConfigError(f"{key}={value}: expected {describe_type(kind)}{hint}")


def format_value(value: Any) -> str:
    """Return ``value`` as it is typed on the command line."""
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)
