"""Hydra composes some 40 files for every run that a test starts or plans; here it is quicker."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import yaml
from hydra import compose, initialize_config_dir
from hydra._internal import defaults_list
from hydra._internal.config_repository import ConfigRepository
from hydra._internal.hydra import Hydra
from hydra.core.global_hydra import GlobalHydra
from hydra.plugins.config_source import ConfigResult
from omegaconf import open_dict
from omegaconf.base import Metadata

from rlhf.config.freeze import to_run_config
from rlhf.config.schema.run import RunConfig

CONF = Path(__file__).parents[1] / "conf"
Load = Callable[[ConfigRepository, str], ConfigResult | None]


def compose_quickly() -> None:
    """Let Hydra read each file once, by libyaml, and look for no interpolations in defaults lists.

    Those of this project have none; one would fail with an AttributeError. Half of the time of a
    composition went into files, and a quarter into names that interpolations could refer to.
    Nor does Hydra compose a command's words twice, just to find hydra.mode, if none can set it.
    """
    yaml.SafeLoader = yaml.CSafeLoader
    defaults_list._create_interpolation_map = lambda *_: None
    Metadata.__deepcopy__ = _copied  # type: ignore[attr-defined]
    ConfigRepository.load_config = _load_once(ConfigRepository.load_config)  # type: ignore[method-assign]
    Hydra.get_mode = _mode_if_named(Hydra.get_mode)  # type: ignore[method-assign]


def compose_once() -> RunConfig:
    """Compose the defaults: what is composed after it, also in forks, has their files in memory."""
    other, GlobalHydra.instance().hydra = GlobalHydra.instance().hydra, None
    with initialize_config_dir(str(CONF), version_base="1.3"):
        config = compose("config", ["experiment=smoke"], return_hydra_config=True)
    GlobalHydra.instance().hydra = other
    with open_dict(config):
        del config["hydra"]
    return to_run_config(config)


def _load_once(load: Load) -> Load:
    """Return ``load`` with a memory of files that have not changed; its results are copies."""
    loaded = dict[tuple[tuple[str, int], ...], ConfigResult | None]()

    def load_config(repository: ConfigRepository, config_path: str) -> ConfigResult | None:
        name = config_path.removesuffix(".yaml")
        paths = [f"{source.path}/{name}.yaml" for source in repository.sources]
        key = tuple(
            (path, os.stat(path).st_mtime_ns if os.path.exists(path) else 0) for path in paths
        )
        if key not in loaded:
            loaded[key] = load(repository, config_path)
        return deepcopy(loaded[key])

    return load_config


def _mode_if_named(get_mode: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``get_mode`` that composes only for words about Hydra: no file of ours has a mode."""

    def mode(hydra: Hydra, config_name: str | None, overrides: list[str]) -> Any:
        if not any("hydra" in word for word in overrides):
            return None
        return get_mode(hydra, config_name, overrides)

    return mode


def _copied(metadata: Metadata, memo: dict[int, Any]) -> Metadata:
    """Return what deepcopy returns: types and keys are constants, flags and caches are not."""
    copied: Metadata = object.__new__(type(metadata))
    copied.__dict__.update(metadata.__dict__)
    copied.flags = dict(metadata.flags or {})
    copied.resolver_cache = defaultdict(dict)
    for name, cache in metadata.resolver_cache.items():
        copied.resolver_cache[name] = dict(cache)
    return copied
