"""Numbers that are not finite: JSON, which does not have them, holds null, read back as NaN."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, SupportsFloat


def float_or_infinity(number: SupportsFloat) -> float:
    """Return ``number`` as a float; infinity if it is a whole number that no float can hold."""
    try:
        return float(number)
    except OverflowError:
        return math.inf


def replace_non_finite(value: object) -> object:
    """Return ``value`` with None in place of numbers that are not finite, at any depth."""
    if isinstance(value, Mapping):
        return {key: replace_non_finite(each) for key, each in value.items()}
    if isinstance(value, list):
        return [replace_non_finite(each) for each in value]
    if isinstance(value, tuple):
        return tuple(replace_non_finite(each) for each in value)
    return None if isinstance(value, float) and not math.isfinite(value) else value


def restore_nan(result: Mapping[str, Any]) -> dict[str, Any]:
    """Return a phase's ``result``, as read from JSON, with NaN in place of null."""
    return {name: math.nan if value is None else value for name, value in result.items()}


def restore_nan_of_run(result: Mapping[str, Any]) -> dict[str, Any]:
    """Return a run's ``result``, as read from result.json, with NaN in place of null."""
    phases = {phase: restore_nan(each) for phase, each in result["phases"].items()}
    return restore_nan(result) | {"phases": phases}
