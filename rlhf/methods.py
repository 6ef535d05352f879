"""Methods: what papers add to PPO or the reward model, as packages that anybody can write.

A package offers a subclass of ``Method`` in the group of entry points ``rlhf.methods``, as
docs/methods.md shows. Installed methods add their keys to the configuration, and take part in runs
that switch them on. Importing a method must not import torch: its functions import what they need.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import asdict, dataclass, fields, make_dataclass
from enum import Enum
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Self, TypeVar, get_type_hints

from rlhf.base.errors import ConfigError
from rlhf.base.packaged_yaml import read_yaml_beside
from rlhf.config.choices import Phase
from rlhf.config.schema.keys import Names, Unread

if TYPE_CHECKING:
    from rlhf.config.schema.model import ModelConfig
    from rlhf.config.schema.run import RunConfig

ENTRY_POINTS = "rlhf.methods"
REWARDS = "rewards"
# The groups to which a method can add keys.
GROUPS = ("data", "reward", "ppo", "rollout", REWARDS, "checkpoint")
T = TypeVar("T")
P = TypeVar("P", bound="Part")


class Part:
    """The base of what a method adds to a part of the program, such as PPO or the planner."""


class MethodKeys:
    """The base of a dataclass whose keys a method adds to a group of the configuration.

    Each key has a default value. Only the fields are added to the group, not the functions.
    """

    @classmethod
    def of(cls, config: object) -> Self:
        """Return the keys with their values in ``config``, a configuration or one of its groups."""
        names = [key.name for key in fields(cls)]  # type: ignore[arg-type]
        groups = [config, *vars(config).values()]
        for group in groups:
            if all(hasattr(group, name) for name in names):
                return cls(**{name: getattr(group, name) for name in names})
        raise TypeError(f"no group has the keys of {cls.__qualname__}; name it in Method.keys")


class Method:
    """A method of RLHF that a run can switch on; a subclass overrides the members that it needs."""

    name: ClassVar[str]
    """The name of the method, which is also the name of its entry point."""
    keys: ClassVar[Mapping[str, type[MethodKeys]]] = {}
    """Keys to add, by group; keys of ``rewards`` are added to each part of the score."""
    off: ClassVar[Mapping[str, Any]] = {}
    """The values that switch the method off, by key. Another value, or a part of the score of a
    kind in ``reward_kinds``, switches it on."""
    unread: ClassVar[Mapping[str, Unread]] = {}
    """Keys of the core, each with the rule for when the method makes it ineffective."""
    reward_kinds: ClassVar[Mapping[str, Sequence[str]]] = {}
    """Keys that a part of ``rewards`` reads, by the kind of the part. Required keys end in *."""
    log: ClassVar[str | None] = None
    """Name of a file NAME.jsonl in the run directory to which rank 0 appends; None: no file."""
    package = ""
    """Name and version of the package of the method; set when the method is found."""

    @property
    def folder(self) -> Path:
        """Return the method's folder, which may hold metrics.yaml, panels.yaml and conf/.

        conf/ has options of the groups of the configuration, such as conf/ppo/NAME.yaml.
        """
        return Path(inspect.getfile(type(self))).parent

    def is_on(self, config: RunConfig) -> bool:
        """Return True if ``config`` switches the method on."""
        kinds = {part.kind for part in config.rewards.values()}
        return not kinds.isdisjoint(self.reward_kinds) or any(
            attrgetter(key)(config) != value for key, value in self.off.items()
        )

    def check(self, config: RunConfig) -> None:
        """Raise ConfigError if ``config`` breaks a rule; called also if the method is off."""

    def check_models(self, config: RunConfig, phases: Container[Phase]) -> None:
        """Raise an error, before the run, if a model of ``phases`` lacks what the method needs."""

    def warnings(self, config: RunConfig) -> Iterator[str]:
        """Yield warnings, which are printed before training in runs with PPO."""
        yield from ()

    def num_added_steps(self, config: RunConfig, phase: Phase, *, examples: int) -> int:
        """Return the optimizer steps that the method adds to ``phase`` (sft, reward or dpo)."""
        return 0

    def reference(self, config: RunConfig, phase: Phase) -> tuple[str, ModelConfig] | None:
        """Return the model that replaces the reference policy of ``phase``, after its key's prefix.

        The key PREFIX_path names the model: the prefix is "ppo.teacher" for ppo.teacher_path. None:
        the reference is the initial policy.
        """
        return None

    def hook(self) -> type[Part] | None:
        """Return the class that takes part in PPO: a ``rlhf.phases.ppo.hooks.PpoHook``."""
        return None

    def costs(self) -> Part | None:
        """Return the costs that the planner adds: a ``rlhf.models.model_uses.Costs``."""
        return None

    def reward_trainer(self) -> type[Part] | None:
        """Return the class that trains the reward model: a ``rlhf.phases.reward.RewardTrainer``."""
        return None

    def reward_model(self) -> Part | None:
        """Return the loader of a trained reward model: a ``rlhf.models.build.Completion``."""
        return None

    def scorer(self) -> Part | None:
        """Return the scorer of responses: a ``rlhf.rewards.isolated.RewardScorer``."""
        return None

    def report(self) -> Part | None:
        """Return the additions to a report: a ``rlhf.report.run_charts.ReportPart``."""
        return None


class _InstalledMethods(NamedTuple):
    """The installed methods by name, and a message for each method that cannot be used."""

    methods: dict[str, Method]
    faults: list[str]


@cache
def _find_methods() -> _InstalledMethods:
    installed = _InstalledMethods({}, [])
    for entry in sorted(entry_points(group=ENTRY_POINTS), key=attrgetter("name")):
        package = f"{entry.dist.name} {entry.dist.version}" if entry.dist else "a package"
        try:
            method = _load_method(entry, package)
            if entry.name in installed.methods:
                raise TypeError(f"{installed.methods[entry.name].package} has this name too")
            installed.methods[entry.name] = method
        except Exception as error:  # a package may raise anything
            installed.faults.append(_describe_fault(entry.name, package, error))
    return installed


def _describe_fault(name: str, package: str, error: Exception) -> str:
    reason = f"{type(error).__name__}: {error}".partition("\n")[0]
    return (
        f"the method {name} of {package} cannot be used ({reason}); update the package, or "
        f"pip uninstall {package.partition(' ')[0]}"
    )


def _load_method(entry: EntryPoint, package: str) -> Method:
    loaded = entry.load()
    if not (isinstance(loaded, type) and issubclass(loaded, Method)):
        raise TypeError(f"{entry.value} is not a subclass of rlhf.methods.Method")
    if loaded.name != entry.name:
        raise TypeError(f"the class has name={loaded.name!r}, and not the entry point's name")
    for group, keys in loaded.keys.items():
        if group not in GROUPS:
            raise TypeError(f"keys has the group {group}; use {', '.join(GROUPS)}")
        keys()  # raises a TypeError that names a key without a default
        get_type_hints(keys)  # raises a NameError if there is no such type
    if loaded.keys and not loaded.off and not loaded.reward_kinds:
        raise TypeError("keys is set, but off and reward_kinds are empty: nothing switches it on")
    for name, value in loaded.off.items():
        group, _, key = name.partition(".")
        if group not in loaded.keys or attrgetter(key)(loaded.keys[group]()) != value:
            raise TypeError(f"off has {name}={value}: no key of the method has this default")
    method = loaded()
    method.package = package
    return method


def installed_methods() -> list[Method]:
    """Return the methods that are installed, sorted by name."""
    return list(_find_methods().methods.values())


def methods_in_use(config: RunConfig) -> list[Method]:
    """Return the installed methods that ``config`` switches on."""
    return [method for method in installed_methods() if method.is_on(config)]


def require_methods(packages: Mapping[str, str]) -> None:
    """Raise ConfigError if a method of ``packages`` (method -> its package) is not installed."""
    refuse_broken_methods()
    for name, package in packages.items():
        if name not in _find_methods().methods:
            raise ConfigError(
                f"the run uses the method {name} of {package}, which is not installed; if you "
                f"trust this package, {how_to_install(package.partition(' ')[0])}"
            )


def how_to_install(package: str) -> str:
    """Return the command that installs ``package``."""
    return "pip install -e lab" if package == "rlhf-lab" else f"pip install {package}"


def refuse_broken_methods() -> None:
    """Raise ConfigError if an installed method cannot be used."""
    for fault in _find_methods().faults:
        raise ConfigError(fault)


def parts_of(kind: type[P], candidates: Iterable[Part | None]) -> list[P]:
    """Return the parts that are not None; raise TypeError if one is no ``kind``."""
    return [_require(isinstance(part, kind), kind, part) for part in candidates if part is not None]


def classes_of(kind: type[P], candidates: Iterable[type[Part] | None]) -> list[type[P]]:
    """Return the classes that are not None; raise TypeError if one is no subclass of ``kind``."""
    return [
        _require(isinstance(part, type) and issubclass(part, kind), kind, part)
        for part in candidates
        if part is not None
    ]


def _require(holds: bool, kind: type[Part], part: Any) -> Any:
    if not holds:
        raise TypeError(f"{part} of a method must be a {kind.__module__}.{kind.__qualname__}")
    return part


def add_keys_of_methods(group: str) -> Callable[[type[T]], type[T]]:
    """Return a decorator that adds the keys of the installed methods to the class of ``group``."""

    def extend(core: type[T]) -> type[T]:
        taken = {key.name: "rlhf" for key in fields(core)}  # type: ignore[arg-type]
        bases: list[type] = [core]
        for method in installed_methods():
            if (keys := method.keys.get(group)) is None:
                continue
            names = [key.name for key in fields(keys)]  # type: ignore[arg-type]
            if clash := next((name for name in names if name in taken), None):
                error = ValueError(f"{group}.{clash} is a key of {taken[clash]}")
                _find_methods().faults.append(_describe_fault(method.name, method.package, error))
                continue
            taken |= dict.fromkeys(names, method.package)
            bases.insert(0, _keep_fields(keys))
        if bases == [core]:
            return core
        namespace = {"__doc__": core.__doc__, "__module__": core.__module__}
        return dataclass(kw_only=True)(type(core.__name__, tuple(bases), namespace))

    return extend


def _keep_fields(keys: type) -> type:
    """Return a class with only the fields of ``keys``, of the same module and name as ``keys``."""
    columns = [(key.name, key.type, copy(key)) for key in fields(keys)]
    names = {"__module__": keys.__module__, "__qualname__": keys.__qualname__}
    return make_dataclass(keys.__name__, columns, namespace=names, kw_only=True)


def read_table(
    method: Method, name: str, parse: Callable[[Mapping[str, Any]], object]
) -> Mapping[str, Any]:
    """Return the content of the YAML file ``name`` of a method; {} if it has no such file.

    If ``parse`` cannot parse the content, ``refuse_broken_methods`` will refuse the method.
    """
    path = method.folder / name
    try:
        content: Mapping[str, Any] = read_yaml_beside(str(path), name) if path.is_file() else {}
        parse(content)
    except Exception as error:  # the file of a package may hold anything
        fault = ValueError(" ".join(f"{name}: {error}".split()))
        _find_methods().faults.append(_describe_fault(method.name, method.package, fault))
        return {}
    return content


def conf_folders() -> list[Path]:
    """Return the conf/ folders of installed methods, with options of configuration groups."""
    folders = (method.folder / "conf" for method in installed_methods())
    return [folder for folder in folders if folder.is_dir()]


def defaults_of_methods() -> dict[str, dict[str, Any]]:
    """Return the defaults of the installed methods' keys by group; an enum member as its name.

    Keys of ``rewards`` are dropped: a part of the score has only the keys that the user sets.
    """
    defaults_by_group: dict[str, dict[str, Any]] = {}
    for method in installed_methods():
        for group, keys in method.keys.items():
            if group != REWARDS:
                defaults = asdict(keys(), dict_factory=_name_values)  # type: ignore[call-overload]
                defaults_by_group.setdefault(group, {}).update(defaults)
    return defaults_by_group


def _name_values(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    return {key: value.name if isinstance(value, Enum) else value for key, value in pairs}


def drop_idle_keys(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``values``, plain values of a configuration, without keys of idle methods.

    A method is idle in a group, or in a part of ``rewards``, in which all its keys have their
    defaults. A run without a method can then be read where its package is not installed.
    """
    kept = dict(values)
    for method in installed_methods():
        for group, keys in method.keys.items():
            defaults = asdict(keys())  # type: ignore[call-overload]
            if group == REWARDS:
                kept[group] = {name: _drop(part, defaults) for name, part in kept[group].items()}
            else:
                kept[group] = _drop(kept[group], defaults)
    return kept


def _drop(group: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    is_idle = all(group[name] == value for name, value in defaults.items())
    return {name: value for name, value in group.items() if not (is_idle and name in defaults)}


def patterns_of_places() -> list[str]:
    """Return a regular expression for each key of installed methods that names a file or folder."""
    return [
        re.escape(f"{group}.{key.name}").replace(f"{REWARDS}\\.", rf"{REWARDS}\..+\.")
        for method in installed_methods()
        for group, keys in method.keys.items()
        for key in fields(keys)  # type: ignore[arg-type]
        if key.metadata.get("names") is Names.place
    ]
