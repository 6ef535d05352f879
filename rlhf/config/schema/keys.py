"""Declare the bound and the effects of a configuration key in its field of the schema.

A field without ``affects``, ``at_resume``, ``is_inherited`` or ``unread`` has its group's values.
``rlhf/config/effects.py`` reads them for the store of phases, resume and from_run.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import MISSING, fields, is_dataclass, replace
from enum import StrEnum
from functools import partial
from typing import Any, NamedTuple

from rlhf.base.errors import ConfigError
from rlhf.base.user_paths import whole_path
from rlhf.config.choices import Phase


class Bound(NamedTuple):
    """A rule for a number: its text in errors, after "must be", and the test."""

    rule: str
    holds: Callable[[float], bool]


ABOVE_0 = Bound("above 0", lambda x: x > 0)
MOST_ROWS = 1_000_000  # per batch; to find divisors of much larger numbers takes hours
ROWS = Bound(f"from 1 to {MOST_ROWS}", lambda x: 1 <= x <= MOST_ROWS)
ABOVE_1 = Bound("above 1", lambda x: x > 1)
AT_LEAST_0 = Bound("0 or more", lambda x: x >= 0)
LARGEST_SCORE = 1e15  # the squares of larger scores overflow in the statistics, which are fp32
SCORE = Bound("a finite number from -1e15 to 1e15", lambda x: abs(x) <= LARGEST_SCORE)
FROM_0_TO_1 = Bound("from 0 to 1", lambda x: 0 <= x <= 1)
FROM_0_BELOW_1 = Bound("at least 0 and below 1", lambda x: 0 <= x < 1)
FROM_0_BELOW_HALF = Bound("at least 0 and below 0.5", lambda x: 0 <= x < 0.5)  # noqa: PLR2004
ABOVE_0_TO_1 = Bound("above 0 and at most 1", lambda x: 0 < x <= 1)
BETWEEN_0_AND_1 = Bound("above 0 and below 1", lambda x: 0 < x < 1)
LAST_PORT = 65535
YEAR_S = 365 * 24 * 60 * 60
# Timers of sockets, signals and torch.distributed overflow after some hundred years.
SECONDS = Bound(f"above 0 and at most {YEAR_S} (a year)", lambda x: 0 < x <= YEAR_S)
MINUTES = Bound(f"above 0 and at most {YEAR_S // 60} (a year)", lambda x: 0 < x <= YEAR_S / 60)
PORT = Bound("from 1 to 65535", lambda x: 0 < x <= LAST_PORT)
ZERO_STAGE = Bound("0, 1, 2 or 3", lambda x: x in range(4))
FROZEN_STAGE = Bound("0 or 3", lambda x: x in {0, 3})
LARGEST_INTEGER = 2**63 - 1  # largest integer of torch

# A function of the whole configuration that returns the phases whose own work reads a key.
Affects = Callable[[Any], frozenset[Phase]]


def always_affects(*phases: Phase) -> Affects:
    """Return a function that returns ``phases`` for every configuration."""
    return lambda _: frozenset(phases)


NO_PHASE = always_affects()
EVERY_PHASE = always_affects(*Phase)
ANSWERING_PHASES = always_affects(Phase.ppo, Phase.dpo)
ONLY_PPO = always_affects(Phase.ppo)

# Keys that parts of ``rewards`` read (environment: not normalise); keys of parts with processes.
PART_KEYS = ("kind", "weight", "normalise")
PROCESS_KEYS = (*PART_KEYS, "timeout_seconds", "fallback")


class AtResume(StrEnum):
    """Rules for changing a key when a run is resumed."""

    fixed = "fixed"  # must not change
    rounding = "rounding"  # may change: the key divides batches, which changes only rounding
    free = "free"  # may change: the key sets how a run is started, watched and stored


class Unread(NamedTuple):
    """A rule for a key that has no effect because of the values of other keys.

    ``keys`` are in the group of the key, unless they have a dot. ``holds`` is called with their
    values, and returns True if the key has no effect. ``fix`` may contain ``{key}`` (the first of
    ``keys``), ``{group}``, ``{option}`` (the key that chooses the group's option) and ``{value}``.
    """

    keys: tuple[str, ...]
    holds: Callable[..., bool]
    fix: str


OFF_VALUES = ("null", "false", "0", "0.0", "none", "never", "disabled")


def needs(key: str, *values: str, fix: str = "") -> Unread:
    """Return the rule for a key that has an effect only if ``key`` has one of ``values``.

    Values are written as on the command line; without ``values``, any but ``OFF_VALUES`` counts.
    """

    def is_unread(value: object) -> bool:
        return format_value(value) not in values if values else format_value(value) in OFF_VALUES

    return Unread((key,), is_unread, fix or f"use {{key}}={' or '.join(values)}")


class Names(StrEnum):
    """The kind of thing that the value of a key names."""

    place = "place"  # files or folders; a run stores their whole paths
    column = "column"  # a column of the data that PPO reads


class LossLimit(NamedTuple):
    """A limit on the tokens, or weights, that a loss learns from, which biases its gradient."""

    off: Any  # the value without a limit
    effect: str  # the effect of the limit, for a sentence of ``rlhf_lab.gradients``


def key(
    bound: Bound | None = None,
    *,
    default: Any = MISSING,
    affects: Affects | None = None,
    at_resume: AtResume | None = None,
    is_inherited: bool | None = None,
    unread: Sequence[Unread] | None = None,
    limit: LossLimit | None = None,
    names: Names | None = None,
) -> Any:
    """Return a dataclass field for a key or a group of keys.

    Args:
        bound: rule for the number; null passes if the field's type allows it.
        default: default value, or the class of a group of keys that all have defaults.
        affects: returns the phases whose own work reads the key, not phases with changed inputs.
        at_resume: whether a resumed run may change the key; by default only if no phase reads it.
        is_inherited: whether a run with from_run takes the key from the finished run.
        unread: rules for when the key has no effect; () if the rules of its group do not apply.
        limit: what the key limits in a loss, for ``rlhf_lab.gradients``.
        names: what the value of the key names.
    """
    if affects is NO_PHASE and at_resume is None:
        at_resume = AtResume.free
    facts = {
        "bound": bound,
        "affects": affects,
        "at_resume": at_resume,
        "is_inherited": is_inherited,
        "unread": unread,
        "limit": limit,
        "names": names,
    }
    metadata = {name: fact for name, fact in facts.items() if fact is not None}
    if isinstance(default, type):
        return dataclasses.field(default_factory=default, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def check_bounds(config: Any) -> None:
    """Check that every number in ``config``, a schema dataclass, is finite and within its bound."""
    for name, bound, value in _iterate_bounds(config):
        if value is not None and not (math.isfinite(value) and bound.holds(value)):
            raise ConfigError(f"{name}={value}: must be {bound.rule}")
        if isinstance(value, int) and value > LARGEST_INTEGER:
            raise ConfigError(f"{name}={value}: must be at most {LARGEST_INTEGER}")


def _iterate_bounds(config: Any, prefix: str = "") -> Iterator[tuple[str, Bound, float | None]]:
    """Yield the dotted key, bound and value of every field with a bound, nested ones included."""
    for field in fields(config):
        name, value = prefix + field.name, getattr(config, field.name)
        if "bound" in field.metadata:
            yield name, field.metadata["bound"], value
        elif is_dataclass(value):
            yield from _iterate_bounds(value, f"{name}.")
        elif isinstance(value, dict):
            for name_in_dict, entry in value.items():
                if is_dataclass(entry):
                    yield from _iterate_bounds(entry, f"{name}.{name_in_dict}.")


def iterate_columns(config: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield the dotted keys in ``config``, a schema dataclass, that name columns, and the names."""
    for field in fields(config):
        value = getattr(config, field.name)
        if field.metadata.get("names") is Names.column and value is not None:
            yield prefix + field.name, value
        elif is_dataclass(value):
            yield from iterate_columns(value, f"{prefix}{field.name}.")


def store_whole_paths(config: Any) -> Any:
    """Return ``config``, a schema dataclass, with whole paths in the keys that name files."""
    changes: dict[str, Any] = {}
    for field in fields(config):
        value = getattr(config, field.name)
        if field.metadata.get("names") is Names.place:
            changes[field.name] = whole_path(value)
        elif is_dataclass(value):
            changes[field.name] = store_whole_paths(value)
        elif isinstance(value, dict):
            changes[field.name] = {
                name: store_whole_paths(entry) if is_dataclass(entry) else entry
                for name, entry in value.items()
            }
    return replace(config, **changes)


def format_value(value: Any, *, keeps_unset: bool = False) -> str:
    """Return ``value`` as it is typed on the command line.

    Unless ``keeps_unset``, entries of mappings are dropped if they are null, false or [].
    """
    if value is None:
        return "null"
    format_each = partial(format_value, keeps_unset=keeps_unset)
    if isinstance(value, dict):
        unset = [k for k, v in value.items() if v is None or v is False or v == []]  # not 0
        kept = {k: v for k, v in value.items() if keeps_unset or k not in unset}
        return f"{{{', '.join(f'{key}: {format_each(each)}' for key, each in kept.items())}}}"
    if isinstance(value, list):
        return f"[{','.join(map(format_each, value))}]"
    return str(value).lower() if isinstance(value, bool) else str(value)
