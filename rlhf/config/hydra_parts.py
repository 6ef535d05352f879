"""The only module of rlhf/ that imports undocumented parts of Hydra: a new release may change them.

Hydra documents its decorator, the Compose API, ConfigStore, HydraConfig and the interfaces of its
plugins. ``tests/config/test_hydra_parts.py`` lists every other part that is used, with its members
and message texts, and fails with the names of those that the installed version lacks.
"""

from __future__ import annotations

import re
from argparse import Namespace
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hydra import initialize_config_dir
from hydra._internal.utils import get_args_parser
from hydra.core.config_loader import ConfigLoader
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep, IntervalSweep, Override, RangeSweep
from hydra.core.plugins import Plugins
from hydra.plugins.launcher import Launcher
from hydra.plugins.search_path_plugin import SearchPathPlugin
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf

from rlhf.base.errors import ConfigError
from rlhf.base.program import CONF, UNCHOSEN, holds_own_options, own_conf
from rlhf.base.user_paths import expand_user_path
from rlhf.methods import conf_folders, defaults_of_methods

__all__ = ["ChoiceSweep", "IntervalSweep", "Override", "RangeSweep"]

# Beginnings of messages, by which rlhf/config/hydra_errors.py recognises errors of Hydra.
NO_TEXT = "Config group override"
FLAGS_CONFLICT = "Only one of --run, --multirun"
RESOLVE_ALONE = "The --resolve flag"
MALFORMED = "Error parsing override '"
NO_SUCH_KEY = "Could not override '"
CHOSEN_TWICE = "Multiple values for "
SWEPT = ("Ambiguous value for argument '", "Sweep parameters '")


def parse_overrides(words: Iterable[str], loader: ConfigLoader | None = None) -> list[Override]:
    """Parse overrides with Hydra's parser; ``loader`` finds the options that a glob(...) matches.

    Raises:
        OverrideParseException: if a word is no override.
    """
    return OverridesParser.create(config_loader=loader).parse_overrides(list(words))


def key_of(override: Override) -> str:
    """Return the key that an override sets, or the group whose option it chooses."""
    return override.package or override.key_or_group


def values_of(override: Override) -> list[str]:
    """Return the values of an override as command-line text; a sweep has several."""
    if override.is_sweep_override():
        return list(override.sweep_string_iterator())
    return [override.get_value_element_as_str()]


def parse_flags(words: Sequence[str]) -> tuple[Namespace, list[str]]:
    """Return a namespace of flags and overrides in ``words``, and the words unknown to Hydra."""
    return get_args_parser().parse_known_args(list(words))


SEARCH_PATH = "hydra.searchpath="  # adds folders that are like conf/


def use_config_dir(words: Sequence[str]) -> list[str]:
    """Replace Hydra's flag ``--config-dir FOLDER`` by the override that adds FOLDER.

    Hydra's ``compose``, the trials of a search and a run's command read the override too.

    Raises:
        ConfigError: if FOLDER is no folder.
    """
    given, _ = parse_flags(words)
    flag = next((n for n, w in enumerate(words) if re.match(r"(--config-d\w*|-cd)(=|$)", w)), None)
    if given.config_dir is None or flag is None:
        return list(words)
    folder = expand_user_path(given.config_dir, key="--config-dir").resolve()
    if not holds_own_options(folder):
        raise ConfigError(
            f"--config-dir={given.config_dir}: must be a folder with the layout of conf/, but "
            f"without {', '.join(UNCHOSEN)}"
        )
    others = [*words[:flag], *words[flag + (1 if "=" in words[flag] else 2) :]]
    # Before the first override, and so behind the flags that may not follow one.
    first = next((n for n, w in enumerate(others) if re.match("[^-].*=", w)), len(others))
    return [*others[:first], search_path_override(folder), *others[first:]]


def search_path_override(folder: Path) -> str:
    """Return the override that lets Hydra also read ``folder``, which is like conf/."""
    place = f"file://{folder}"
    if not re.fullmatch(r"[\w:/.-]+", place):
        place = "'{}'".format(place.replace("'", r"\'"))
    return f"{SEARCH_PATH}[{place}]"


def own_folders(words: Iterable[str]) -> list[Path]:
    """Return the folders with a user's own options: conf/ here, and those that ``words`` add."""
    given = [
        each.value() for each in parse_overrides(w for w in words if w.startswith(SEARCH_PATH))
    ]
    paths = [str(path) for value in given if isinstance(value, list) for path in value]
    added = [Path(path.removeprefix("file://")) for path in paths]
    return [*own_conf(), *(folder for folder in added if folder.is_dir())]


def own_options_in_use(words: Iterable[str]) -> Iterator[tuple[str, Path]]:
    """Yield GROUP/OPTION.yaml and its file for each own option that the composed job chose."""
    folders = own_folders(words)
    for group, option in HydraConfig.get().runtime.choices.items() if folders else ():
        name = f"{group.partition('@')[0]}/{option}.yaml"
        files = (folder / name for folder in folders if not (CONF / name).exists())
        yield from ((name, file) for file in files if file.is_file())


def set_job_config(cfg: DictConfig) -> None:
    """Let ``HydraConfig.get()`` return the node ``hydra`` of the composed ``cfg``."""
    HydraConfig.instance().set_config(cfg)


def register_sweeper(kind: type[Sweeper], name: str, **keys: Any) -> None:
    """Let Hydra find ``hydra/sweeper=NAME``, whose ``keys`` are arguments of ``kind``.

    Hydra starts only sweepers of its own modules and of the package hydra_plugins.
    """
    plugins = Plugins.instance()  # imports Hydra's sweepers anew: an earlier import is outdated
    from hydra._internal.core_plugins import basic_sweeper

    kind.__module__ = basic_sweeper.__name__
    setattr(basic_sweeper, kind.__name__, kind)
    plugins.register(kind)
    node = {"_target_": f"{kind.__module__}.{kind.__name__}", **keys}
    ConfigStore.instance().store(group="hydra/sweeper", name=name, node=node)


class AddedSearchPath(SearchPathPlugin):
    """The part of Hydra's search path with options of installed methods and of the user."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """Add the folders after conf/: Hydra prefers a file in conf/ to theirs."""
        for folder in [*conf_folders(), *own_conf()]:
            search_path.append("rlhf", f"file://{folder}")


def extend_hydra() -> None:
    """Give Hydra the options of installed methods, their keys, and this project's resolver.

    The keys are stored as the config ``methods``. conf/base/ppo.yaml calls the resolver, so that
    log-probs of a vLLM server are corrected by default.
    """
    OmegaConf.register_new_resolver(
        "rlhf_correction", lambda name: "token" if name == "vllm_server" else "none", replace=True
    )
    ConfigStore.instance().store("methods", defaults_of_methods())
    Plugins.instance().register(AddedSearchPath)


@contextmanager
def composing(conf: Path) -> Iterator[None]:
    """Let Hydra's ``compose`` read the folder ``conf``, and what installed methods add to it."""
    extend_hydra()
    with initialize_config_dir(str(conf.resolve()), version_base="1.3"):
        yield


def build_launcher(context: HydraContext, task: TaskFunction, config: DictConfig) -> Launcher:
    """Return the launcher that the command chose, which calls ``task`` for each job."""
    return Plugins.instance().instantiate_launcher(
        hydra_context=context, task_function=task, config=config
    )


def call_in_this_process(
    jobs: Sequence[Sequence[str]], context: HydraContext, task: TaskFunction, config: DictConfig
) -> list[Any]:
    """Compose every job from its overrides, call ``task`` with it, and return the results."""
    from hydra._internal.core_plugins.basic_launcher import BasicLauncher

    launcher = BasicLauncher()
    launcher.setup(hydra_context=context, task_function=task, config=config)
    return [returned.return_value for returned in launcher.launch(jobs, initial_job_idx=0)]
