"""Replace numbers that JSON cannot express: NaN and the infinities become null."""

from __future__ import annotations

import math
from collections.abc import Mapping


def finite(value: object) -> object:
    """Return ``value`` with None in place of numbers that are not finite, at any depth."""
    if isinstance(value, Mapping):
        return {key: finite(each) for key, each in value.items()}
    if isinstance(value, list):
        return [finite(each) for each in value]
    if isinstance(value, tuple):
        return tuple(finite(each) for each in value)
    return None if isinstance(value, float) and not math.isfinite(value) else value
