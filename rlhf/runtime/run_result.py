"""The result of a whole run: result.json, the report, and the summary on the terminal."""

from __future__ import annotations

import importlib.metadata
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlhf.checkpoint.results import phase_result, phase_result_path, taken_phases
from rlhf.config.choices import Phase
from rlhf.config.schema.run import RunConfig
from rlhf.foreign_errors import reason_of
from rlhf.runtime.objective import objective_measure
from rlhf.runtime.plan_comparison import whole_beside_the_plan
from rlhf.stored_files import PHASES, read_json
from rlhf.tracking.console import Console
from rlhf.tracking.report.run_page import write_report
from rlhf.tracking.summary import show_summary


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


def show_run(console: Console, run_dir: Path, result: Mapping[str, Any] | None) -> None:
    """Write the report of what there is, and print the summary of ``result`` if the run has ended.

    Neither is worth a result, or the reason for which a run ends: a failure is a warning.
    """
    try:
        write_report(run_dir)
        if result is not None:
            show_summary(console, result, run_dir)
    except Exception as error:
        console.say(
            f"warning: the report of {run_dir} is incomplete: {reason_of(error)}. The results are "
            f"not affected; python -m rlhf.report {run_dir} writes the report again"
        )
