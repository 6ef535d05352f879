"""Check of metric names: only documented metrics may be logged."""

from __future__ import annotations

import difflib

from rlhf.tracking.metric_table import METRICS, entry_of


def check_name(name: str) -> None:
    """Check that the metric ``name`` is documented.

    Raises:
        KeyError: if no table contains ``name``; the message gives the nearest name.
    """
    if entry_of(name) in METRICS:
        return
    nearest = difflib.get_close_matches(name, METRICS, n=1, cutoff=0.0)[0]
    raise KeyError(
        f"unknown metric {name!r}; the nearest is {nearest!r}. "
        "A new metric needs an entry in rlhf/tracking/metric_table.py."
    )
