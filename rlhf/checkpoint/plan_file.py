"""The plan of a run, plan.json, which its measurements are compared with."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from rlhf.base.stored_files import MAYBE_FLOAT, OTHERS, DamagedFileError, read_json

PLAN = "plan.json"
COST = {"hours": MAYBE_FLOAT, "memory_gib_per_rank": float}
STORED_PLAN = {"hours": MAYBE_FLOAT, "memory_gib_limit": float, "phases": {OTHERS: COST}}


def read_plan(run_dir: Path, say: Callable[[str], None] | None = None) -> dict[str, Any] | None:
    """Return the content of plan.json; None if there is none, or a damaged one.

    The plan only serves a comparison with what is measured: ``say`` prints that it is damaged.
    """
    try:
        found: dict[str, Any] | None = read_json(run_dir / PLAN, STORED_PLAN)
    except DamagedFileError as error:
        if say is not None:
            say(f"warning: {error}. The run continues without planned values")
        return None
    return found
