"""The result of a whole run, the content of result.json."""

from __future__ import annotations

import importlib.metadata
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlhf.base.stored_files import PHASES, read_json
from rlhf.checkpoint.results import phase_result, phase_result_path, taken_phases
from rlhf.config.choices import Phase
from rlhf.config.schema.run import RunConfig
from rlhf.runtime.objective import objective_measure
from rlhf.runtime.plan_comparison import whole_beside_the_plan


def unfinished_phases(config: RunConfig, run_dir: Path) -> list[Phase]:
    """Return the phases that have no result yet.

    Raises:
        DamagedFileError: if the result of a phase, here or in ``from_run``, is not what it writes.
    """
    for phase in taken_phases(config):
        read_json(phase_result_path(Path(str(config.from_run)), phase), PHASES[phase])
    results = {p: read_json(phase_result_path(run_dir, p), PHASES[p]) for p in config.phase.order}
    return [phase for phase, result in results.items() if result is None]


def whole_result(config: RunConfig, run_dir: Path, ran: Sequence[Phase]) -> dict[str, Any]:
    """Return the content of result.json; ``ran`` are the phases that this process ran."""
    result = summarise(config.phase.order, run_dir)
    return result | whole_beside_the_plan(run_dir, result["phases"], ran)


def summarise(order: Sequence[Phase], run_dir: Path) -> dict[str, Any]:
    """Return the objective, the results of the phases and the versions of libraries."""
    phases = {p.value: phase_result(run_dir, p) or {} for p in order}
    packages = ("rlhf", "torch", "deepspeed", "transformers")
    versions = {name: importlib.metadata.version(name) for name in packages}
    return {
        "objective": objective_measure(phases, run_dir)[1],
        "phases": phases,
        "versions": {"python": platform.python_version(), **versions},
    }
