"""The result of a whole run (result.json): its objective, and what was planned and measured."""

from __future__ import annotations

import importlib.metadata
import math
import os
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlhf.base.errors import CheckpointError, RlhfError
from rlhf.base.finite_numbers import find_non_finite
from rlhf.base.ranks import Ranks
from rlhf.base.stored_files import PHASES, read_json
from rlhf.checkpoint.results import phase_result_path, read_phase_result, read_plan, reused_phases
from rlhf.config.choices import Phase
from rlhf.config.schema.run import RunConfig
from rlhf.engine.devices import peak_memory_gib

# The objective is a measure of the last phase: the first of these that the phase has.
MEASURES: Mapping[Phase, tuple[str, ...]] = {
    Phase.sft: ("perplexity_after",),
    Phase.reward: ("accuracy",),
    Phase.ppo: ("gold_after", "score_after"),
    Phase.dpo: ("gold_after", "accuracy"),
}


def unfinished_phases(config: RunConfig, run_dir: Path) -> list[Phase]:
    """Return the phases that have no result yet.

    Raises:
        DamagedFileError: if the result of a phase, here or in ``from_run``, has a wrong form.
    """
    for phase in reused_phases(config):
        read_json(phase_result_path(Path(str(config.from_run)), phase), PHASES[phase])
    results = {p: read_json(phase_result_path(run_dir, p), PHASES[p]) for p in config.phase.order}
    return [phase for phase, result in results.items() if result is None]


def build_run_result(config: RunConfig, run_dir: Path, ran: Sequence[Phase]) -> dict[str, Any]:
    """Return the content of result.json; ``ran`` are the phases that this process ran."""
    result = collect_results(config.phase.order, run_dir)
    return result | compare_run_with_plan(run_dir, result["phases"], ran)


def collect_results(order: Sequence[Phase], run_dir: Path) -> dict[str, Any]:
    """Return the objective, the results of the phases and the versions of libraries."""
    phases = {p.value: read_phase_result(run_dir, p) or {} for p in order}
    return {
        "objective": find_objective(phases, run_dir)[1],
        "phases": phases,
        "versions": library_versions(),
    }


def library_versions() -> dict[str, str]:
    """Return the versions of Python, of this package and of the libraries that compute."""
    packages = ("rlhf", "torch", "deepspeed", "transformers")
    versions = {name: importlib.metadata.version(name) for name in packages}
    return {"python": platform.python_version(), **versions}


def find_objective(phases: Mapping[str, Mapping[str, Any]], run_dir: Path) -> tuple[str, float]:
    """Return the name PHASE.MEASURE of the objective, and its value; a perplexity is negated.

    Raises:
        CheckpointError: if the last phase has no such measure.
    """
    phase, measures = list(phases.items())[-1]
    for name in MEASURES[Phase(phase)]:
        if isinstance(value := measures.get(name), int | float):
            return f"{phase}.{name}", -value if phase == Phase.sft else value
    raise CheckpointError(
        f"{run_dir / phase / 'result.json'} has no {MEASURES[Phase(phase)][-1]}: it is damaged, or "
        f"of another version. Restore it, or remove it: resume={run_dir} trains {phase} again"
    )


def require_finite_objective(phases: Mapping[str, Mapping[str, Any]], run_dir: Path) -> None:
    """Check that all measures after training are finite, since a NaN policy may score 0."""
    name, value = find_objective(phases, run_dir)
    if not (bad := find_non_finite(phases)):
        return
    name = name if not math.isfinite(value) else bad[0]
    phase = bad[0].partition(".")[0]
    raise RlhfError(
        f"{run_dir}: the run has ended without a usable model, since {name} is not a finite number "
        f"(not finite: {', '.join(bad)}). Either the weights that {phase} started from are damaged "
        f"or its training diverged: {run_dir}/report.html shows the step. Start a new run with a "
        f"lower learning rate of {phase}, with hardware.dtype=fp32, or from other weights"
    )


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
