"""Convert numbers that are not finite: JSON stores them as null, which is read back as NaN."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any


def float_or_infinity(number: float) -> float:
    """Return ``number`` as a float; infinity, with its sign, if no float can hold it."""
    try:
        return float(number)
    except OverflowError:
        return math.inf if number > 0 else -math.inf


def replace_non_finite(value: object) -> object:
    """Return ``value`` with None in place of numbers that are not finite, at any depth."""
    if isinstance(value, Mapping):
        return {key: replace_non_finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [replace_non_finite(item) for item in value]
    if isinstance(value, tuple):
        return tuple(replace_non_finite(item) for item in value)
    return None if isinstance(value, float) and not math.isfinite(value) else value


def format_json(content: Mapping[str, Any], *, indent: int | None = 2) -> str:
    """Return ``content`` as the text of a JSON file, with null for numbers that are not finite."""
    return json.dumps(replace_non_finite(content), indent=indent, allow_nan=False) + "\n"


def restore_nan(result: Mapping[str, Any]) -> dict[str, Any]:
    """Return a phase's ``result``, as read from JSON, with NaN in place of null, at any depth.

    The entry ``planned`` keeps its nulls, which stand for unknown numbers.
    """
    return {k: value if k == "planned" else _nan_for_null(value) for k, value in result.items()}


def _nan_for_null(value: Any) -> Any:
    if isinstance(value, Mapping):
        return restore_nan(value)
    if isinstance(value, list):
        return [_nan_for_null(item) for item in value]
    return math.nan if value is None else value


def non_finite_names(phases: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return PHASE.MEASURE for each number that is not finite; skip measures named *_before."""
    return [
        f"{phase}.{name}"
        for phase, measures in phases.items()
        for name, value in measures.items()
        if isinstance(value, float) and not math.isfinite(value) and not name.endswith("_before")
    ]
