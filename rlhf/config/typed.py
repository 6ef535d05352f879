"""Merge Hydra's composed configuration into the schema, and convert it to a RunConfig."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, is_dataclass
from enum import Enum
from functools import cache
from typing import Any

from omegaconf import DictConfig, OmegaConf, SCMode
from omegaconf.errors import (
    ConfigKeyError,
    InterpolationResolutionError,
    MissingMandatoryValue,
    OmegaConfBaseException,
)

from rlhf.base.errors import ConfigError
from rlhf.config.hydra_errors import (
    describe_type,
    did_you_mean,
    interpolation_error,
    missing_package,
    schema_types,
    shorten,
    type_of_key,
    unknown_key_error,
)
from rlhf.config.schema.keys import format_value
from rlhf.config.schema.run import RunConfig
from rlhf.config.validation import validate


def to_run_config(cfg: DictConfig) -> RunConfig:
    """Return a composed configuration as dataclasses, after checking its types and all rules."""
    merged = merge_into_schema(cfg)
    try:
        config = OmegaConf.to_object(merged)
    except MissingMandatoryValue as error:
        plain = OmegaConf.to_container(merged, structured_config_mode=SCMode.DICT)
        key = min(name for name, value in flatten_keys(plain).items() if value == "???")
        raise ConfigError(f"{key} is missing: add {key}=VALUE to the command") from error
    except OmegaConfBaseException as error:
        raise schema_error(error) from error
    assert isinstance(config, RunConfig)
    validate(config)
    return config


def with_values(config: RunConfig, values: Mapping[str, Any]) -> RunConfig:
    """Return ``config`` with the dotted keys in ``values`` replaced, after checking all rules."""
    cfg = OmegaConf.create(asdict(config))
    for key, value in values.items():
        OmegaConf.update(cfg, key, value)
    return to_run_config(cfg)


def merge_into_schema(cfg: DictConfig) -> DictConfig:
    """Return ``cfg`` merged into the schema; mandatory values may still be missing.

    Raises:
        ConfigError: if a value has the wrong type. For true or false, OmegaConf accepts any number,
            but this function only 0 and 1.
    """
    # The filled schema would add missing groups: use it only if every group is a mapping.
    is_whole = all(
        key in cfg and not OmegaConf.is_interpolation(cfg, key) and OmegaConf.is_dict(cfg[key])
        for key in _group_types()
    )
    return _merge(_filled_schema() if is_whole else OmegaConf.structured(RunConfig), cfg)


def _merge(schema: DictConfig, cfg: DictConfig) -> DictConfig:
    try:
        for key in (key for key, kind in schema_types().items() if kind is bool):
            if isinstance(value := OmegaConf.select(cfg, key), int | float) and value not in (0, 1):
                raise ConfigError(f"{key}={value}: expected true or false")
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
    if (package := missing_package(f"{key}={value}")) is not None:
        return ConfigError(f"{key}={value}: {package}")
    hint = did_you_mean(value, getattr(kind, "__members__", ()))
    if key == "reward_model":
        hint = f"; an option of the group is chosen with model@reward_model={value}"
    return ConfigError(f"{key}={value}: expected {describe_type(kind)}{hint}")


def values_by_key(config: RunConfig) -> dict[str, Any]:
    """Return the plain value of every dotted key of ``config``; an enum member becomes its name."""
    return flatten_keys(_to_plain(asdict(config)))


def _to_plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _to_plain(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_to_plain(item) for item in value]
    return value.name if isinstance(value, Enum) else value


def composed_values(cfg: DictConfig) -> dict[str, Any]:
    """Return the plain value of every dotted key of ``cfg``, as ``values_by_key`` does.

    Raises:
        ConfigError: if an interpolation in ``cfg`` has no value.
    """
    try:
        plain = OmegaConf.to_container(
            cfg, resolve=True, enum_to_str=True, structured_config_mode=SCMode.DICT
        )
    except OmegaConfBaseException as error:
        raise schema_error(error) from error
    return flatten_keys(plain)


def flatten_keys(node: Any, key: str = "") -> dict[str, Any]:
    """Return one entry per value in ``node``, with dotted keys that start with ``key``."""
    if not isinstance(node, dict) or not node:
        return {key: node}
    prefix = f"{key}." if key else ""
    return {k: v for name in node for k, v in flatten_keys(node[name], f"{prefix}{name}").items()}
