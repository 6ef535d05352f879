"""Bounds of numeric config keys, declared in the fields of the schema."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import MISSING, field, fields, is_dataclass
from typing import Any, NamedTuple

from rlhf.errors import ConfigError


class Bound(NamedTuple):
    """A rule for one number: the error message's text after "must be", and the test."""

    rule: str
    holds: Callable[[float], bool]


ABOVE_0 = Bound("above 0", lambda x: x > 0)
ABOVE_1 = Bound("above 1", lambda x: x > 1)
AT_LEAST_0 = Bound("0 or more", lambda x: x >= 0)
LARGEST_SCORE = 1e15  # the squares of larger scores overflow in the statistics, which are fp32
SCORE = Bound("a finite number from -1e15 to 1e15", lambda x: abs(x) <= LARGEST_SCORE)
FROM_0_TO_1 = Bound("from 0 to 1", lambda x: 0 <= x <= 1)
FROM_0_BELOW_1 = Bound("at least 0 and below 1", lambda x: 0 <= x < 1)
FROM_0_BELOW_HALF = Bound("at least 0 and below 0.5", lambda x: 0 <= x < 0.5)  # noqa: PLR2004
ABOVE_0_TO_1 = Bound("above 0 and at most 1", lambda x: 0 < x <= 1)
BETWEEN_0_AND_1 = Bound("above 0 and below 1", lambda x: 0 < x < 1)
YEAR_S = 365 * 24 * 60 * 60
# Timers of sockets, signals and torch.distributed overflow at some hundred years.
SECONDS = Bound(f"above 0 and at most {YEAR_S} (a year)", lambda x: 0 < x <= YEAR_S)
MINUTES = Bound(f"above 0 and at most {YEAR_S // 60} (a year)", lambda x: 0 < x <= YEAR_S / 60)
ZERO_STAGE = Bound("0, 1, 2 or 3", lambda x: x in range(4))
FROZEN_STAGE = Bound("0 or 3", lambda x: x in {0, 3})


LARGEST = 2**63 - 1  # what torch's integers hold


def bounded(bound: Bound, *, default: Any = MISSING) -> Any:
    """Return a dataclass field whose value must be within ``bound`` or null."""
    return field(default=default, metadata={"bound": bound})


def check_bounds(config: Any, prefix: str = "") -> None:
    """Check that every number in ``config``, a schema dataclass, is within its field's bound.

    Raises:
        ConfigError: if a number breaks its bound or is not finite; the message names its key.
    """
    for key, bound, value in _bounded_numbers(config, prefix):
        if value is not None and not (math.isfinite(value) and bound.holds(value)):
            raise ConfigError(f"{key}={value}: must be {bound.rule}")
        if isinstance(value, int) and value > LARGEST:
            raise ConfigError(f"{key}={value}: must be at most {LARGEST}")


def _bounded_numbers(config: Any, prefix: str) -> Iterator[tuple[str, Bound, float | None]]:
    """Yield the dotted key, bound and value of every field with a bound, nested ones included."""
    for each in fields(config):
        key, value = prefix + each.name, getattr(config, each.name)
        if "bound" in each.metadata:
            yield key, each.metadata["bound"], value
        elif is_dataclass(value):
            yield from _bounded_numbers(value, f"{key}.")
        elif isinstance(value, dict):
            for name, one in value.items():
                if is_dataclass(one):
                    yield from _bounded_numbers(one, f"{key}.{name}.")
