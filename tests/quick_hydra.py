"""Hydra composes some 40 files for every run that a test starts or plans; here it is quicker."""

import os
from collections import defaultdict
from collections.abc import Callable
from copy import deepcopy
from dataclasses import asdict
from functools import lru_cache
from pathlib import Path
from typing import Any

import omegaconf
import yaml
from hydra import compose
from hydra._internal import defaults_list
from hydra._internal.config_repository import ConfigRepository
from hydra._internal.hydra import Hydra
from hydra.core.global_hydra import GlobalHydra
from hydra.plugins.config_source import ConfigResult
from omegaconf import DictConfig, ListConfig, Node, OmegaConf, UnionNode, ValueNode, open_dict
from omegaconf.base import Box, Metadata

from rlhf.config import typed
from rlhf.config.hydra_parts import composing
from rlhf.config.schema.run import RunConfig

CONF = Path(__file__).parents[1] / "conf"
Load = Callable[[ConfigRepository, str], ConfigResult | None]
Merge = Callable[[DictConfig, DictConfig], DictConfig]


def compose_quickly() -> None:
    """Let Hydra read each file once, by libyaml, and look for no interpolations in defaults lists.

    Those of this project have none; one would fail with an AttributeError. Half of the time of a
    composition went into files, and a quarter into names that interpolations could refer to.
    A copy of a node is one of its parts: OmegaConf makes an empty node first, and checks it.
    Hydra does not compose a command's words twice, just to find hydra.mode, if none can set it.
    Groups of keys that were merged before are not merged again, see _merge_groups_once.
    """
    yaml.SafeLoader = yaml.CSafeLoader
    defaults_list._create_interpolation_map = lambda *_: None
    Metadata.__deepcopy__ = _copied  # type: ignore[attr-defined]
    for kind in (DictConfig, ListConfig, UnionNode, *ValueNode.__subclasses__()):
        kind.__deepcopy__ = _copied_node
    Box._re_parent = _set_parents  # type: ignore[method-assign]
    omegaconf.base.parse = lru_cache(omegaconf.base.parse)  # of interpolations: some ten a config
    ConfigRepository.load_config = _load_once(ConfigRepository.load_config)  # type: ignore[method-assign]
    Hydra.get_mode = _mode_if_named(Hydra.get_mode)  # type: ignore[method-assign]
    typed._merge = _merge_groups_once(typed._merge)


def compose_once() -> RunConfig:
    """Compose the defaults, and load them as a run does: forks have files and groups in memory."""
    other, GlobalHydra.instance().hydra = GlobalHydra.instance().hydra, None
    with composing(CONF):
        config = compose("config", ["experiment=smoke"], return_hydra_config=True)
    GlobalHydra.instance().hydra = other
    with open_dict(config):
        del config["hydra"]
    return typed.to_run_config(OmegaConf.create(asdict(typed.to_run_config(config))))


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


def _merge_groups_once(merge: Merge) -> Merge:
    """Return ``merge`` with a memory of merged groups of keys: most configurations change few.

    A copy of what such a group became takes its place in the schema, and the rest is merged.
    """
    merged = dict[tuple[str, Any], Node]()

    def merge_rest(schema: DictConfig, cfg: DictConfig) -> DictConfig:
        if schema is not typed._filled_schema():
            return merge(schema, cfg)
        groups = {name: cfg._get_node(name) for name in typed._group_types()}
        keys = {name: (name, _values_in(node)) for name, node in groups.items()}
        known = {name for name in groups if keys[name] in merged}
        found, rest = deepcopy(schema), object.__new__(DictConfig)
        for name in known:
            found.__dict__["_content"][name] = node = deepcopy(merged[keys[name]])
            node._set_parent(found)
        rest.__dict__.update(cfg.__dict__)
        content = cfg.__dict__["_content"].items()
        rest.__dict__["_content"] = {name: node for name, node in content if name not in known}
        found = merge(found, rest)
        for name in groups.keys() - known:
            merged[keys[name]] = deepcopy(found._get_node(name))
        return found

    return merge_rest


def _values_in(node: Any) -> Any:
    """Return what is in a node, with its types, as a value that can be a key."""
    match state := node.__dict__.get("_content", node.__dict__.get("_val")):
        case dict():
            return tuple((name, _values_in(each)) for name, each in state.items())
        case list():
            return (list, *map(_values_in, state))
        case Node():
            return _values_in(state)
        case _:
            return type(state), state


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


def _copied_node(node: Any, memo: dict[int, Any]) -> Any:
    """Return what deepcopy returns: a value is shared, and so is the parent of the whole copy."""
    state = node.__dict__
    copied = object.__new__(type(node))
    copied.__dict__.update(state)
    copied.__dict__.update(_metadata=_copied(state["_metadata"], memo), _flags_cache=None)
    match state.get("_content"):
        case dict() as content:
            below = {key: _copied_node(each, memo) for key, each in content.items()}
            parts = list(below.values())
        case list() as content:
            below = parts = [_copied_node(each, memo) for each in content]
        case Node() as content:
            below = _copied_node(content, memo)
            parts = [below]
        case _:
            return copied
    copied.__dict__["_content"] = below
    for each in parts:
        each.__dict__["_parent"] = copied
    return copied


def _set_parents(box: Box) -> None:
    """Do what Box._re_parent does: each merge asks for it again, and most parents are right."""
    content = box.__dict__["_content"]
    parts = [content] if isinstance(content, Node) else content if isinstance(content, list) else ()
    for part in content.values() if isinstance(content, dict) else parts:
        if part.__dict__["_parent"] is not box:
            part._set_parent(box)
        if "_content" in part.__dict__:
            _set_parents(part)
