"""Write the report of a run, or compare runs.

python -m rlhf.report RUN_DIR                 write RUN_DIR/report.html
python -m rlhf.report RUN_DIR RUN_DIR ...     print a comparison
python -m rlhf.report SWEEP_DIR               print it, and write SWEEP_DIR/sweep.html
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import yaml

from rlhf.atomic import replacing
from rlhf.checkpoint.results import write_json
from rlhf.command import exit_code
from rlhf.config.freeze import FROZEN
from rlhf.tracking.comparison import (
    comparison_json,
    comparison_table,
    read_run,
    run_folders,
    settings_of,
)
from rlhf.tracking.console import build_console
from rlhf.tracking.report.run_page import write_report
from rlhf.tracking.report.sweep_page import write_sweep_report
from rlhf.user_paths import user_path


def compare(paths: Sequence[Path]) -> None:
    """Print a comparison of the runs in ``paths``; in a sweep's folder, write it there too.

    Raises:
        CheckpointError: if a path holds no run.
    """
    settings = settings_of([read_run(folder) for folder in run_folders(paths)])
    console = build_console(is_main=True, log_every=1)
    console.show(comparison_table(settings))
    unfinished = [run for setting in settings for run in setting.runs if not run.measures]
    for run in unfinished:
        console.say(f"no result: {run.folder}")
    if len(paths) == 1 and not (paths[0] / FROZEN).exists():
        content = comparison_json(settings)
        write_json(paths[0] / "result.json", content)
        with replacing(paths[0] / "multirun.yaml") as building:
            building.write_text(yaml.safe_dump(content, sort_keys=False))
        console.say(f"wrote {write_sweep_report(paths[0], settings)}")


def report(run_dir: Path) -> None:
    """Write the report of one run and print where it is.

    Raises:
        CheckpointError: if ``run_dir`` is not the directory of a run.
    """
    build_console(is_main=True, log_every=1).say(f"wrote {write_report(run_dir)}")


def main(arguments: Sequence[str]) -> int:
    """Write a report, or compare the runs that the command names; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m rlhf.report",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("paths", nargs="+", metavar="RUN_DIR|SWEEP_DIR")
    options = parser.parse_args(arguments)
    return exit_code(lambda: _report_or_compare(options.paths))


def _report_or_compare(words: Sequence[str]) -> None:
    paths = [user_path(word, key="RUN_DIR") for word in words]
    if len(paths) == 1 and (paths[0] / FROZEN).is_file():
        report(paths[0])
    else:
        compare(paths)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
