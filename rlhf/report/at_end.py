"""Print the summary and write the report of a run or a sweep when it ends."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rlhf.base.foreign_errors import reason_of
from rlhf.base.program import name_commands
from rlhf.base.stored_files import find_folders_with
from rlhf.config.freeze import FROZEN
from rlhf.run.console import Console
from rlhf.run.results import finished_phases, read_phase_result, read_run_result
from rlhf.run.step_alarms import describe_divergence, read_alarms


@contextmanager
def report_on_exit(run_dir: Path) -> Iterator[None]:
    """When the context ends, print the summary of the run's result, then write its report.

    If the summary or the report fails, a warning is printed and the other one is still made. An
    error that was raised inside the context is raised again.
    """
    try:
        yield
    finally:
        console = Console()
        for part, make in (("summary", _print_summary), ("report", _write_report)):
            try:
                make(run_dir, console)
            except Exception as error:
                again = name_commands(f"python -m rlhf.report {run_dir}")
                console.say(
                    f"warning: the {part} of {run_dir} is incomplete: {reason_of(error)}. The "
                    f"results are not affected; {again} writes the report again"
                )


def _print_summary(run_dir: Path, console: Console) -> None:
    from rlhf.report.charts import read_run_files
    from rlhf.report.first_screen import read_verdict
    from rlhf.report.summary import print_summary

    result = read_run_result(run_dir)
    if result is None and describe_divergence(read_alarms(run_dir)) is not None:
        done = {phase: read_phase_result(run_dir, phase) for phase in finished_phases(run_dir)}
        result = {"objective": math.nan, "phases": done, "versions": {}}
    if result is not None:
        print_summary(console, result, run_dir, read_verdict(read_run_files(run_dir)).text)


def _write_report(run_dir: Path, console: Console) -> None:
    from rlhf.base.user_paths import relative_to_cwd
    from rlhf.report.run_page import write_report

    path = write_report(run_dir)
    console.say(f"report: {relative_to_cwd(path)}")


def compare_jobs(folder: Path) -> None:
    """Print and write a comparison of the sweep's runs in ``folder``, if any run has begun."""
    if any(find_folders_with(FROZEN, folder)):
        from rlhf.report.compare_runs import print_comparison

        print_comparison([folder])
