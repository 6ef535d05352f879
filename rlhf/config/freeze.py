"""From Hydra's composed configuration to a RunConfig, to RUN_DIR/config.yaml, and back."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf, SCMode
from omegaconf.errors import ConfigKeyError, InterpolationResolutionError, OmegaConfBaseException

from rlhf.config.checks import validate
from rlhf.config.names import did_you_mean, in_words, schema_types, unknown_key
from rlhf.config.schema import RunConfig
from rlhf.errors import CheckpointError, ConfigError

FROZEN = "config.yaml"
FREE = ("launcher.", "plan.")  # these, and what is below, change nothing of what is computed


def to_run_config(cfg: DictConfig) -> RunConfig:
    """The plain dataclasses of a composed configuration, checked."""
    typed = _typed(cfg)
    try:
        missing = sorted(OmegaConf.missing_keys(typed))
        if missing:
            raise ConfigError(f"{missing[0]} is missing: add {missing[0]}=VALUE to the command")
        config = OmegaConf.to_object(typed)
    except OmegaConfBaseException as error:
        raise _refused(error) from error
    assert isinstance(config, RunConfig)
    validate(config)
    return config


def freeze(config: RunConfig, run_dir: Path) -> None:
    """Write the configuration that every rank reads; all of it, or nothing."""
    unfinished = run_dir / f".{FROZEN}.{os.getpid()}"
    OmegaConf.save(OmegaConf.structured(config), unfinished)
    unfinished.replace(run_dir / FROZEN)


def load_frozen(run_dir: Path) -> RunConfig:
    """The configuration that a run was started with."""
    path = run_dir / FROZEN
    if not path.is_file():
        raise CheckpointError(f"{run_dir} is not the directory of a run: it has no {FROZEN}")
    try:
        return to_run_config(DictConfig(OmegaConf.load(path)))
    except (ConfigError, OmegaConfBaseException) as error:
        reason = str(error).partition("\n")[0]
        raise CheckpointError(
            f"{path} cannot be read: {reason}. "
            "If another version of this program wrote it, go on with that version."
        ) from error


def load_run(run_dir: str | Path) -> RunConfig:
    """Return the configuration of a run, with ``run_dir`` as the place where it is now."""
    path = Path(run_dir).expanduser()
    return replace(load_frozen(path), run_dir=str(path))


def refuse_changes(frozen: RunConfig, cfg: DictConfig, overrides: Sequence[str]) -> None:
    """Refuse overrides, composed into ``cfg``, that would change what the run computes."""
    kept, asked = _leaves(OmegaConf.structured(frozen)), _leaves(_typed(cfg))
    for override in OverridesParser.create().parse_overrides(list(overrides)):
        changed = [
            leaf
            for leaf in _below(override, kept | asked)
            if kept.get(leaf) != asked.get(leaf) and not f"{leaf}.".startswith(FREE)
        ]
        if changed and _node(override) != "resume":
            raise ConfigError(
                f"{override.input_line}: the run was started with "
                f"{changed[0]}={_shown(kept.get(changed[0]))} and goes on with it; "
                "leave this out, or start a new run without resume"
            )


def with_free_keys(frozen: RunConfig, cfg: DictConfig, overrides: Sequence[str]) -> RunConfig:
    """The run that goes on, with what ``overrides`` say of how it is started."""
    config, asked = OmegaConf.structured(frozen), _leaves(_typed(cfg))
    for override in OverridesParser.create().parse_overrides(list(overrides)):
        for leaf in _below(override, asked):
            if f"{leaf}.".startswith(FREE):
                OmegaConf.update(config, leaf, asked[leaf])
    return to_run_config(config)


def _node(override: Override) -> str:
    """The group or key that an override sets."""
    return override.package or override.key_or_group


def _below(override: Override, leaves: Iterable[str]) -> list[str]:
    """Those of ``leaves`` that an override sets."""
    return [leaf for leaf in leaves if f"{leaf}.".startswith(f"{_node(override)}.")]


def _typed(cfg: DictConfig) -> DictConfig:
    """``cfg`` under the schema; values may still be missing."""
    try:
        typed = OmegaConf.merge(OmegaConf.structured(RunConfig), cfg)
    except OmegaConfBaseException as error:
        raise _refused(error) from error
    assert isinstance(typed, DictConfig)
    return typed


def _leaves(cfg: DictConfig) -> dict[str, Any]:
    """Dotted key -> plain value."""
    try:
        plain = OmegaConf.to_container(
            cfg, resolve=True, enum_to_str=True, structured_config_mode=SCMode.DICT
        )
    except OmegaConfBaseException as error:
        raise _refused(error) from error
    return _flat(plain, "")


def _flat(node: Any, key: str) -> dict[str, Any]:
    """``node``, which lies under ``key``, with one entry for each value in it."""
    if not isinstance(node, dict) or not node:
        return {key: node}
    prefix = f"{key}." if key else ""
    return {k: v for name in node for k, v in _flat(node[name], f"{prefix}{name}").items()}


def _refused(error: OmegaConfBaseException) -> ConfigError:
    """A value or key that the schema does not admit, in our words."""
    key = re.sub(r"\[\d+\]", "", error.full_key or "")
    if isinstance(error, ConfigKeyError):
        return unknown_key(key)
    reason = (error.msg or str(error)).partition("\n")[0]
    if isinstance(error, InterpolationResolutionError):
        return ConfigError(f"{key}: {reason}")
    kind = schema_types()[key]
    value = _shown(error.value)
    hint = did_you_mean(value, getattr(kind, "__members__", ()))
    if key == "reward_model":
        hint = f"; an option of the group is chosen with model@reward_model={value}"
    return ConfigError(f"{key}={value}: expected {in_words(kind)}{hint}")


def _shown(value: Any) -> str:
    """``value`` as it is typed."""
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)
