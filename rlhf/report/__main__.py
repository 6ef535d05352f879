"""Write the report of a run, or compare runs.

python -m rlhf.report RUN_DIR                 write RUN_DIR/report.html
python -m rlhf.report RUN_DIR RUN_DIR ...     print a comparison; --html FILE writes its page
python -m rlhf.report SWEEP_DIR               print a comparison; write SWEEP_DIR/sweep.html

A comparison is corrected for all settings tried with the same model and data, shown or not.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from rlhf.base.command import Result, build_command_parser, run_to_exit_code
from rlhf.base.user_paths import expand_user_path
from rlhf.config.freeze import FROZEN
from rlhf.config.run_dir import find_run_dir
from rlhf.report.compare_runs import print_comparison
from rlhf.report.run_page import write_report
from rlhf.run.console import Console
from rlhf.run.results import read_run_result
from rlhf.run.step_alarms import read_alarms


def main(arguments: Sequence[str]) -> int:
    """Write a report, or compare the runs that the command names; return the exit code."""
    parser = build_command_parser("rlhf.report", __doc__, has_json=True)
    parser.add_argument(
        "paths", nargs="*", metavar="RUN_DIR|SWEEP_DIR", help="default: runs/latest"
    )
    parser.add_argument("--html", metavar="FILE", help="also write the comparison as an HTML page")
    parser.add_argument(
        "--registry", metavar="FOLDER", help="folder of all settings tried; default: runs/"
    )
    options = parser.parse_args(arguments)
    return run_to_exit_code(lambda: _report_or_compare(options), as_json=options.json)


def _report_or_compare(options: argparse.Namespace) -> Result:
    paths = [find_run_dir(word) for word in options.paths or [None]]
    html, registry = (
        None if word is None else expand_user_path(word, key=key)
        for key, word in (("--html", options.html), ("--registry", options.registry))
    )
    if len(paths) == 1 and (paths[0] / FROZEN).is_file() and html is None and registry is None:
        page, result = write_report(paths[0]), read_run_result(paths[0])
        Console().say(f"wrote {page}")
        alarms = [alarm._asdict() for alarm in read_alarms(paths[0])]
        return Result({"run": str(paths[0]), "page": str(page), "alarms": alarms, "result": result})
    return Result(print_comparison(paths, html, registry))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
