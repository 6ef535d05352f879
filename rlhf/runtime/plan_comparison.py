"""Compare the time and peak memory of a run with its plan."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlhf.base.ranks import Ranks
from rlhf.checkpoint.results import read_plan
from rlhf.config.choices import Phase
from rlhf.engine.devices import peak_memory_gib


def compare_phase_with_plan(
    run_dir: Path, phase: Phase, seconds: float, ranks: Ranks
) -> dict[str, dict[str, float]]:
    """Return the phase's hours and peak memory in GiB, measured and planned, for its result.

    On a CPU peak memory is counted from the start of the process, so it includes earlier phases.
    """
    measured = {"hours": seconds / 3600, "memory_gib": peak_memory_gib(ranks)}
    phases = (read_plan(run_dir) or {"phases": {}})["phases"]
    if phase not in phases:  # plan=off, or a model with an unknown shape
        return {"measured": measured}
    first = list(phases).index(phase) if ranks.device.type == "cuda" else 0
    counted = list(phases)[first : list(phases).index(phase) + 1]
    planned = {
        "hours": phases[phase]["hours"],
        "memory_gib": max(phases[name]["memory_gib_per_rank"] for name in counted),
    }
    return {"planned": planned, "measured": measured}


def compare_run_with_plan(
    run_dir: Path, phases: Mapping[str, Any], unfinished: Sequence[Phase]
) -> dict[str, dict[str, float]]:
    """Return the hours and peak memory in GiB of the whole run, measured and planned.

    The time counts from the start of the process, so it includes loading libraries. The time of
    phases that an earlier attempt finished is added. A run that took all its phases from others has
    no peak memory of its own.
    """
    own = {name: each for name, each in phases.items() if "reused_from" not in each}
    earlier = sum(each["seconds"] for name, each in own.items() if name not in unfinished)
    measured = {"hours": (seconds_since_process_start() + earlier) / 3600}
    if own:
        measured["memory_gib"] = max(each["measured"]["memory_gib"] for each in own.values())
    if not (plan := read_plan(run_dir)) or not plan["phases"]:
        return {"measured": measured}
    memory = max(each["memory_gib_per_rank"] for each in plan["phases"].values())
    return {"planned": {"hours": plan["hours"], "memory_gib": memory}, "measured": measured}


def seconds_since_process_start() -> float:
    """Return the seconds since this process started, as Linux counts them."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    started = int(fields[19]) / os.sysconf("SC_CLK_TCK")  # field 22 of proc(5), starttime
    return float(Path("/proc/uptime").read_text().split()[0]) - started
