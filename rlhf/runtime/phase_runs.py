"""Run a phase, or take it from another run; verify finished phases; build result.json."""

from __future__ import annotations

import math
import os
import platform
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from rlhf.base.cpu import read_cpu, usable_isa
from rlhf.base.errors import CheckpointError, RlhfError
from rlhf.base.finite_numbers import non_finite_names
from rlhf.base.packaged_yaml import read_yaml_beside
from rlhf.base.ranks import Ranks
from rlhf.base.stored_files import (
    ATTEMPTS,
    MANIFEST,
    PHASES,
    RESULT,
    SAMPLES,
    find_entries,
    read_json,
)
from rlhf.base.versions import code_version, installed_version
from rlhf.config.choices import Phase
from rlhf.config.run_dir import refuse_links
from rlhf.config.schema.run import RunConfig
from rlhf.engine.devices import peak_memory_gib, reset_peak_memory
from rlhf.kernels.kernel_checks import replaced_kernels
from rlhf.methods import methods_in_use
from rlhf.phases.shared.context import RunContext
from rlhf.run.finished_phase import (
    STATE,
    copy_phase_lines,
    finish_phase,
    iterate_metrics,
    link_phase,
    verify_phase,
)
from rlhf.run.phase_state import checkpoint_folders
from rlhf.run.results import (
    hash_files,
    phase_result_path,
    read_phase_result,
    read_plan,
    reused_phases,
)
from rlhf.runtime.rendezvous import num_cores_per_rank

OBJECTIVES: Mapping[str, Sequence[str]] = read_yaml_beside(__file__, "measure_names.yaml")[
    "objectives"
]


def unfinished_phases(config: RunConfig, run_dir: Path) -> list[Phase]:
    """Return the phases that have no result yet.

    Raises:
        DamagedFileError: if the result of a phase, here or in ``from_run``, is malformed.
    """
    for phase in reused_phases(config):
        read_json(phase_result_path(Path(str(config.from_run)), phase), PHASES[phase])
    results = {p: read_json(phase_result_path(run_dir, p), PHASES[p]) for p in config.phase.order}
    return [phase for phase, result in results.items() if result is None]


def build_run_result(config: RunConfig, run_dir: Path, ran: Sequence[Phase]) -> dict[str, Any]:
    """Return the content of result.json; ``ran`` are the phases that this process ran."""
    result = collect_results(config.phase.order, run_dir)
    records = [ATTEMPTS.name, *(f"{phase}/{MANIFEST}" for phase in config.phase.order)]
    result["records"] = hash_files(run_dir, records)
    if judges := {name: part.sealed for name, part in config.rewards.items() if part.sealed}:
        result["judges"] = judges
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
    versions = {name: installed_version(name) for name in packages}
    return {"python": platform.python_version(), **versions}


def describe_environment(config: RunConfig) -> dict[str, str]:
    """Return, by name, the version of the code and all that the rounding of a run depends on."""
    is_on_gpu = config.hardware.device == "cuda" and torch.cuda.is_available()
    return library_versions() | {
        "code": code_version(),
        "device": torch.cuda.get_device_name() if is_on_gpu else read_cpu().name,
        "instructions": f"{torch.backends.cpu.get_cpu_capability()}, {usable_isa().name}",
        "threads": str(num_cores_per_rank(config.hardware)),
        **{f"method {method.name}": method.package for method in methods_in_use(config)},
    }


def find_objective(phases: Mapping[str, Mapping[str, Any]], run_dir: Path) -> tuple[str, float]:
    """Return the name PHASE.MEASURE of the objective, and its value; a perplexity is negated.

    Raises:
        CheckpointError: if the last phase has no such measure.
    """
    phase, measures = list(phases.items())[-1]
    for name in OBJECTIVES[phase]:
        if isinstance(value := measures.get(name), int | float):
            return f"{phase}.{name}", -value if phase == Phase.sft else value
    raise CheckpointError(
        f"{run_dir / phase / RESULT} has no {OBJECTIVES[phase][-1]}: it is damaged, or "
        f"of another version. Restore it, or remove it: resume={run_dir} trains {phase} again"
    )


def require_finite_objective(phases: Mapping[str, Mapping[str, Any]], run_dir: Path) -> None:
    """Raise RlhfError if a measure after training is not finite, even if the objective is."""
    name, value = find_objective(phases, run_dir)
    if not (non_finite := non_finite_names(phases)):
        return
    name = name if not math.isfinite(value) else non_finite[0]
    phase = non_finite[0].partition(".")[0]
    raise RlhfError(
        f"{run_dir}: the run has ended without a usable model, since {name} is not a finite number "
        f"(not finite: {', '.join(non_finite)}). Either the weights that {phase} started from "
        f"are damaged or its training diverged: {run_dir}/report.html shows the step. Start a new "
        f"run with a lower learning rate of {phase}, hardware.dtype=fp32, or from other weights"
    )


def compare_phase_with_plan(
    run_dir: Path, phase: Phase, seconds: float, ranks: Ranks
) -> dict[str, dict[str, float]]:
    """Return the hours and peak memory in GiB of a phase, measured and planned, for its result.

    On a CPU peak memory is counted from the start of the process, so it includes earlier phases.
    """
    measured = {"hours": seconds / 3600, "memory_gib": peak_memory_gib(ranks)}
    phases = (read_plan(run_dir) or {"phases": {}})["phases"]
    if phase not in phases:  # the run has plan=off, or a model of unknown shape
        return {"measured": measured}
    start = list(phases).index(phase) if ranks.device.type == "cuda" else 0
    counted = list(phases)[start : list(phases).index(phase) + 1]
    planned = {
        "hours": phases[phase]["hours"],
        "memory_gib": max(phases[name]["memory_gib_per_rank"] for name in counted),
    }
    return {"planned": planned, "measured": measured}


def compare_run_with_plan(
    run_dir: Path, phases: Mapping[str, Any], ran: Sequence[Phase]
) -> dict[str, dict[str, float]]:
    """Return the hours and peak memory in GiB of the whole run, measured and planned.

    The time counts from the start of the process, so it includes loading libraries. The time of
    phases that an earlier attempt finished, which are not in ``ran``, is added. A resumed phase
    has the time of earlier attempts too. A run that reused all its phases has no peak memory.
    """
    trained = {name: each for name, each in phases.items() if "reused_from" not in each}
    earlier = sum(each["seconds"] for name, each in trained.items() if name not in ran)
    in_this_process = sum(each["seconds"] for each in trained.values()) - earlier
    measured = {"hours": (max(seconds_since_process_start(), in_this_process) + earlier) / 3600}
    if trained:
        measured["memory_gib"] = max(each["measured"]["memory_gib"] for each in trained.values())
    if not (plan := read_plan(run_dir)) or not plan["phases"]:
        return {"measured": measured}
    memory = max(each["memory_gib_per_rank"] for each in plan["phases"].values())
    return {"planned": {"hours": plan["hours"], "memory_gib": memory}, "measured": measured}


def seconds_since_process_start() -> float:
    """Return the seconds since this process started, from /proc."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    started = int(fields[19]) / os.sysconf("SC_CLK_TCK")  # field 22 of proc(5), starttime
    return float(Path("/proc/uptime").read_text().split()[0]) - started


def run_phase(
    context: RunContext, phase: Phase, runner: Callable[[RunContext], dict[str, Any]]
) -> None:
    """Run a phase and write its result, or take the result from a run that had the same inputs."""
    config, run_dir, ranks = context.config, context.run_dir, context.ranks
    if phase in reused_phases(config):
        reuse_phase(context, phase, Path(str(config.from_run)))
        return

    def train() -> dict[str, Any]:
        reset_peak_memory(ranks)
        with ExitStack() as opened:
            started = time.monotonic()
            result = runner(replace(context, phase_started=started, opened=opened))
        result |= compare_phase_with_plan(run_dir, phase, result["seconds"], ranks)
        if lines := {line for each in ranks.all_gather(replaced_kernels()) for line in each}:
            result["replaced_kernels"] = sorted(lines)
        if ranks.is_main:
            finish_phase(run_dir, phase, result)
            remove_finished_checkpoints(config, run_dir, phase)
        return result

    if config.reuse.phases == "never":
        train()
    else:
        from rlhf.options.phase_store.phases import train_or_reuse

        train_or_reuse(context, phase, train, partial(reuse_phase, context, phase))
    ranks.barrier()


def verify_finished_phases(
    run_dir: Path, finished: Sequence[Phase], config: RunConfig, say: Callable[[str], None]
) -> None:
    """Verify the finished phases of a resumed run; remove files that a killed attempt left."""
    refuse_links(run_dir, [f"{phase}{under}" for phase in finished for under in ("", f"/{STATE}")])
    for phase in finished:
        if (notice := verify_phase(run_dir, phase)) is not None:
            say(f"warning: {notice}")
        for path in find_entries(run_dir / phase, ".*.building"):
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        remove_finished_checkpoints(config, run_dir, phase)


def remove_finished_checkpoints(config: RunConfig, run_dir: Path, phase: Phase) -> None:
    """Remove the checkpoints of a finished phase, except the latest of the run's last phase."""
    if config.checkpoint.keep_finished:
        return
    is_last = phase is config.phase.order[-1]
    earlier = checkpoint_folders(run_dir / phase)[1:]
    for folder in earlier if is_last else [run_dir / phase / STATE]:
        shutil.rmtree(folder, ignore_errors=True)


def reuse_phase(context: RunContext, phase: Phase, source: Path) -> None:
    """Copy a finished phase, with its metrics and samples, from the folder ``source``.

    Raises:
        CheckpointError: if the phase of ``from_run`` is damaged; the phase store verifies its own.
    """
    run_dir, ranks = context.run_dir, context.ranks
    if ranks.is_main:
        if phase in reused_phases(context.config) and (notice := verify_phase(source, phase)):
            context.console.say(f"warning: {notice}")
        origin = (read_phase_result(source, phase) or {}).get("reused_from", str(source))
        for of_phase, step, values in iterate_metrics(source):
            if of_phase == phase:
                context.tracker.log(phase, step, values)
        copy_phase_lines(source, phase, run_dir, SAMPLES.name)
        link_phase(source, phase, run_dir, reused_from=origin)
        context.console.say(f"{phase}: taken from {origin}, which had the same inputs")
    ranks.barrier()
