"""Write and print the results when a run or a sweep ends; pages are imported only then."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rlhf.base.foreign_errors import reason_of
from rlhf.base.stored_files import RESULT, read_json
from rlhf.tracking.console import build_console


@contextmanager
def report_on_exit(run_dir: Path) -> Iterator[None]:
    """When the context ends, write the report of the run and print the summary of its result.

    If that fails, only a warning is printed: neither the result nor the context's error is lost.
    """
    try:
        yield
    finally:
        console = build_console(is_main=True, log_every=1)
        try:
            from rlhf.report.run_page import write_report
            from rlhf.report.summary import print_summary

            write_report(run_dir)
            if (result := read_json(run_dir / "result.json", RESULT)) is not None:
                print_summary(console, result, run_dir)
        except Exception as error:
            console.say(
                f"warning: the report of {run_dir} is incomplete: {reason_of(error)}. The results "
                f"are not affected; python -m rlhf.report {run_dir} writes the report again"
            )


def compare_jobs(folder: Path) -> None:
    """Print and write a comparison of the runs of a sweep in ``folder``, if any run has begun."""
    if any(folder.rglob("config.yaml")):
        from rlhf.report.compare_runs import compare

        compare([folder])
