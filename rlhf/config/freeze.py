"""Save the configuration of a run in its directory; load it; change it when the run resumes."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from enum import Enum
from functools import lru_cache
from io import StringIO
from pathlib import Path
from textwrap import indent
from types import UnionType
from typing import Any, get_args

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from rlhf.base.atomic import replace_atomically, write_text_atomically
from rlhf.base.errors import CheckpointError, ConfigError
from rlhf.base.foreign_errors import reason_of
from rlhf.base.program import launch_command
from rlhf.base.safe_text import sanitize_for_terminal
from rlhf.base.stored_files import DamagedFileError, read_stored_text
from rlhf.base.trust import remember
from rlhf.base.user_paths import expand_user_path, relative_to_cwd, whole_path
from rlhf.config.choices import Phase
from rlhf.config.effects import effect_of, effects_by_key
from rlhf.config.history import Changes, bring_up_to_date
from rlhf.config.hydra_errors import describe_type, schema_types, to_hydra_override
from rlhf.config.hydra_parts import Override, key_of, parse_overrides
from rlhf.config.more_steps import STEPS, adds_steps
from rlhf.config.schema.keys import AtResume, format_value
from rlhf.config.schema.run import RunConfig
from rlhf.config.typed import (
    composed_values,
    flatten_keys,
    merge_into_schema,
    to_run_config,
    values_by_key,
    with_values,
)
from rlhf.config.validation import iterate_entries
from rlhf.methods import drop_idle_keys, methods_in_use, require_methods

FROZEN = "config.yaml"
METHODS = "methods"  # in FROZEN: the package of each method that the run uses
COMMAND = "command.txt"
MICRO_BATCH_KEYS = tuple(f"{phase}.micro_batch_size" for phase in Phase)
# Keys that hardware.on_oom=reduce_micro_batch may lower.
REDUCED_SIZES = {*MICRO_BATCH_KEYS, "rollout.max_rows", "rollout.keep_graphs"}
# Limits of the config.yaml of a run directory, which somebody else may have written.
MOST_CHARACTERS = 1_000_000  # a run with a hundred data sets writes fewer
MOST_LEVELS = 12  # of nested mappings and lists
LONGEST_COMMAND = 100_000  # characters of command.txt; shlex takes a second for twice as many
LARGEST_INTEGER = 2**63 - 1  # of 64 bits
# Errors of a text that is no plain YAML, or that has more than a run writes.
PARSE_ERRORS = (OmegaConfBaseException, YAMLError, ValueError, RecursionError)


def write_frozen_config(config: RunConfig, run_dir: Path) -> None:
    """Write the configuration for all ranks to ``run_dir``; record that this user wrote it.

    The file names the methods that the run uses, with their packages, and has no keys of idle ones.
    """
    used = {method.name: method.package for method in methods_in_use(config)}
    values = drop_idle_keys(asdict(config)) | ({METHODS: used} if used else {})
    with replace_atomically(run_dir / FROZEN) as building:
        OmegaConf.save(OmegaConf.create(values), building)
    remember(run_dir / FROZEN)


def write_command(overrides: Sequence[str], run_dir: Path) -> None:
    """Write to ``run_dir`` the command that started the run, with links in paths resolved."""
    write_text_atomically(run_dir / COMMAND, launch_command(map(_word_to_repeat, overrides)) + "\n")


def _word_to_repeat(override: str) -> str:
    """Return an override as typed, with a link such as runs/latest replaced by its target."""
    typed = override.removeprefix("++")  # which to_hydra_override adds to a mapping
    override = typed if to_hydra_override(typed) == override else override
    key, _, value = override.partition("=")
    path = whole_path(value)
    is_linked = path not in (value, os.path.abspath(value))
    return f"{key}={relative_to_cwd(Path(path))}" if is_linked else override


def load_frozen_config(run_dir: Path) -> RunConfig:
    """Return the configuration that a run was started with, brought up to date.

    A line to stderr names the changes.

    Raises:
        CheckpointError: if ``run_dir`` has no configuration, or an unreadable one.
    """
    return _load_config(run_dir / FROZEN, _frozen_text(run_dir))


def load_config_to_continue(run_dir: Path) -> RunConfig:
    """Return the configuration of a run that is continued, as ``load_frozen_config`` does.

    Raises:
        CheckpointError: also if the run uses a key that a later version has removed.
    """
    changes = read_changes(run_dir)
    for text, key in changes.texts.items():
        if (effect := effects_by_key().get(key)) is None or not effect.resume_may_change:
            raise CheckpointError(
                f"{run_dir}: {text}. Resume the run with the version that began it, rlhf "
                f"{changes.version}, or start a new run with from_run={run_dir}"
            )
    return load_frozen_config(run_dir)


@lru_cache(maxsize=1)  # it is loaded several times, and the changes are printed once
def _load_config(path: Path, text: str) -> RunConfig:
    try:
        values, changes = _parse_frozen(path, text)
        methods = values.pop(METHODS, {})
        if not isinstance(methods, Mapping) or not all(
            isinstance(p, str) for p in methods.values()
        ):
            raise _unreadable_error(path, f"{METHODS} does not map names to packages")
        require_methods(methods)
        config = to_run_config(OmegaConf.create(values))
    except (ConfigError, OmegaConfBaseException) as error:
        raise _unreadable_error(path, str(error).partition("\n")[0]) from error
    if line := changes.describe():
        sys.stderr.write(f"{sanitize_for_terminal(f'{path}, {line}')}\n")
    return config


def read_frozen_keys(run_dir: Path) -> dict[str, Any]:
    """Return the value of every dotted key that a run was started with, brought up to date.

    Only types are checked, so runs of newer versions and of absent packages can be read too. Keys
    that were removed, but had an effect, stay: they tell runs apart.
    """
    values, changes = _parse_frozen(path := run_dir / FROZEN, _frozen_text(run_dir))
    return FrozenKeys(path, {**flatten_keys(values), **changes.lost})


def read_changes(run_dir: Path) -> Changes:
    """Return the changes that bring the stored configuration of a run up to date."""
    return _parse_frozen(run_dir / FROZEN, _frozen_text(run_dir))[1]


def read_command(run_dir: Path) -> list[str]:
    """Return the overrides of the command that started a run; [] if they are not stored.

    Raises:
        DamagedFileError: if the stored command is too long, or cannot be split into words.
    """
    text = read_stored_text(run_dir / COMMAND) or ""
    if len(text) > LONGEST_COMMAND:
        raise DamagedFileError(run_dir / COMMAND, f"it has more than {LONGEST_COMMAND} characters")
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise DamagedFileError(run_dir / COMMAND, str(error)) from error
    return words[1:] if words[:1] == ["rlhf"] else words[2:]  # python launch.py


class FrozenKeys(dict[str, Any]):
    """Dotted keys of a run, and their values; reading a missing key raises a CheckpointError."""

    def __init__(self, path: Path, values: dict[str, Any]) -> None:
        super().__init__(values)
        self._path = path
        for key, kind in schema_types().items():
            if key in self and not matches_schema_type(self[key], kind):
                raise _unreadable_error(path, f"{key} is not {describe_type(kind)}")

    def __missing__(self, key: str) -> Any:
        raise _unreadable_error(self._path, f"{key} is missing")


def _frozen_text(run_dir: Path) -> str:
    if (text := read_stored_text(run_dir / FROZEN)) is None:
        hint = "there is no such folder; python -m rlhf.runs lists the runs of this folder"
        reason = f"it has no {FROZEN}" if run_dir.is_dir() else hint
        raise CheckpointError(f"{run_dir} is not the directory of a run: {reason}")
    return text


def _parse_frozen(path: Path, text: str) -> tuple[dict[Any, Any], Changes]:
    """Return the stored values, brought up to date, and the changes to them."""
    try:
        if "seed" not in (mapping := load_plain_mapping(text)):
            raise ValueError("it has none of the keys of a run")
        values = OmegaConf.to_container(mapping)
        assert isinstance(values, dict)
        return values, bring_up_to_date(values)
    except PARSE_ERRORS as error:
        raise _unreadable_error(path, reason_of(error)) from error


def _unreadable_error(path: Path, reason: str) -> CheckpointError:
    return CheckpointError(
        f"{path} cannot be read: {reason}. "
        "If another version of this program wrote the file, resume the run with that version."
    )


def load_run(run_dir: str | Path) -> RunConfig:
    """Return the configuration of the run in ``run_dir``, with this folder as its key run_dir."""
    path = expand_user_path(run_dir, key="run_dir")
    return replace(load_frozen_config(path), run_dir=str(path))


def apply_resume_overrides(
    frozen: RunConfig, cfg: DictConfig, overrides: Sequence[str]
) -> RunConfig:
    """Return ``frozen``, changed by ``overrides``, whose values Hydra has composed into ``cfg``.

    If an override sets a key of hardware or zero, micro-batch sizes without an override become
    null, because the planned sizes may not fit.

    Raises:
        ConfigError: if an override changes what the run computes; the message gives the value that
            the run was started with.
    """
    kept, asked = values_by_key(frozen), composed_values(merge_into_schema(cfg))
    leaves: list[str] = []
    run = str(cfg.get("resume"))
    for override in parse_overrides(overrides):
        changed = [
            leaf
            for leaf in _keys_set_by(override, kept | asked)
            if kept.get(leaf) not in (value := asked.get(leaf), whole_path(value))
            and not effect_of(leaf).resume_may_change
            and not (leaf == STEPS and adds_steps(frozen, asked.get(leaf), run=run))
        ]
        if changed and key_of(override) != "resume":
            anew = f"{override.input_line} from_run={run} and the overrides in {run}/{COMMAND}"
            how = "without resume" if effect_of(changed[0]).is_inherited else f"with {anew}"
            raise ConfigError(
                f"{override.input_line}: the run was started with "
                f"{changed[0]}={format_value(kept.get(changed[0]))}, which resume cannot "
                f"change; remove this override, or start a new run {how}"
            )
        leaves += [
            leaf
            for leaf in _keys_set_by(override, asked)
            if effect_of(leaf).resume_may_change or leaf == STEPS
        ]
    divides_anew = any(key.startswith(("hardware.", "zero.")) for key in leaves)
    changes: dict[str, Any] = dict.fromkeys(MICRO_BATCH_KEYS) if divides_anew else {}
    return with_values(frozen, changes | {leaf: asked[leaf] for leaf in leaves})


def _keys_set_by(override: Override, leaves: Iterable[str]) -> list[str]:
    return [leaf for leaf in leaves if f"{leaf}.".startswith(f"{key_of(override)}.")]


def is_same_run(stored: RunConfig, asked: RunConfig) -> bool:
    """Return True if two configurations differ only in keys that a resumed run may change."""
    stored_values, asked_values = (flatten_keys(asdict(config)) for config in (stored, asked))
    return all(
        stored_values.get(key, ...) == asked_values.get(key, ...)
        for key in stored_values | asked_values
        if not effect_of(key).resume_may_change
    )


def keep_reduced_sizes(stored: RunConfig, asked: RunConfig) -> RunConfig:
    """Return ``asked`` with the sizes in ``stored`` that were reduced after running out of memory.

    If ``asked`` divides batches in other ways too, as over more ranks, it is returned unchanged.
    """
    changes = {change.partition("=")[0] for change in batch_division_changes(stored, asked)}
    if not changes or not changes <= REDUCED_SIZES:
        return asked
    kept = values_by_key(stored)
    return with_values(asked, {key: kept[key] for key in changes})


def batch_division_changes(before: RunConfig, after: RunConfig) -> list[str]:
    """Return, as key=value, the changes of a resumed run that divide its batches differently."""
    kept = values_by_key(before)
    return [
        f"{key}={format_value(value)}"
        for key, value in values_by_key(after).items()
        if effect_of(key).at_resume is AtResume.rounding and kept[key] != value
    ]


@lru_cache(maxsize=4)  # a run parses its file a dozen times; callers do not change it
def parse_plain_value(text: str) -> Any:
    """Return the value of one key in ``text``; errors are those of ``load_plain_mapping``."""
    mapping = OmegaConf.to_container(load_plain_mapping(f"value:\n{indent(text, '  ')}"))
    assert isinstance(mapping, dict)
    return mapping["value"]


def load_plain_mapping(text: str) -> DictConfig:
    """Return the mapping in ``text``, which must contain only plain values, as runs write them.

    Raises one of ``PARSE_ERRORS`` for another text: aliases could expand a small file to any size,
    and interpolations could read the environment.
    """
    if len(text) > MOST_CHARACTERS:
        raise ValueError(f"it has more than {MOST_CHARACTERS} characters")
    depth = 0
    for event in yaml.parse(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)):
        if isinstance(event, yaml.AliasEvent):
            raise ValueError("it has an alias (*), which no run writes")
        if (tag := getattr(event, "tag", None)) is not None:
            raise ValueError(f"it has a tag ({tag}), which no run writes")
        depth += isinstance(event, yaml.CollectionStartEvent)
        depth -= isinstance(event, yaml.CollectionEndEvent)
        if depth > MOST_LEVELS:
            raise ValueError(f"it has more than {MOST_LEVELS} levels")
    mapping = OmegaConf.load(StringIO(text))
    if not isinstance(mapping, DictConfig):
        raise ValueError("it has none of the keys of a run")
    for _, value in iterate_entries(OmegaConf.to_container(mapping, resolve=False)):
        if isinstance(value, str) and "${" in value:
            raise ValueError("it has an interpolation (${...}), which no run writes")
        if isinstance(value, str) and "\0" in value:
            raise ValueError("it has a NUL character, which no path or text may have")
        if isinstance(value, int) and abs(value) > LARGEST_INTEGER:
            raise ValueError("it has a whole number of more than 64 bits")
    return mapping


def matches_schema_type(value: Any, kind: Any) -> bool:
    """Return True if ``value``, read from a file, may be a value of the schema's type ``kind``."""
    if kind is Any:  # such as data.path, a file or a list of files
        return True
    if isinstance(kind, UnionType):
        return any(matches_schema_type(value, one_kind) for one_kind in get_args(kind))
    if kind in {bool, str, type(None)}:
        return isinstance(value, kind)
    if kind in {int, float}:
        return isinstance(value, (int, kind)) and not isinstance(value, bool)
    if isinstance(kind, type) and issubclass(kind, Enum):
        return isinstance(value, str)
    return isinstance(value, dict | list) or value is None
