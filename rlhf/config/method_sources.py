"""Let Hydra find the default values of installed methods, and their options of groups."""

from __future__ import annotations

from enum import Enum
from typing import Any

from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.config_store import ConfigStore
from hydra.core.plugins import Plugins
from hydra.plugins.search_path_plugin import SearchPathPlugin

from rlhf.methods import conf_folders, defaults_of_methods


class MethodsSearchPath(SearchPathPlugin):
    """The part of Hydra's search path with the folders of installed methods."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """Add the folders behind conf/ of the project, whose files come first."""
        for folder in conf_folders():
            search_path.append("rlhf-methods", f"file://{folder}")


def register_methods() -> None:
    """Register the methods, before Hydra composes conf/config.yaml, which names their defaults."""
    ConfigStore.instance().store("methods", _to_plain(defaults_of_methods()))
    Plugins.instance().register(MethodsSearchPath)


def _to_plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _to_plain(entry) for name, entry in value.items()}
    return value.name if isinstance(value, Enum) else value
