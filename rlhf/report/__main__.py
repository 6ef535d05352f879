"""Write the report of a run, or compare runs.

python -m rlhf.report RUN_DIR                 write RUN_DIR/report.html
python -m rlhf.report RUN_DIR RUN_DIR ...     print a comparison; --html FILE: also as a page
python -m rlhf.report SWEEP_DIR               print a comparison; write SWEEP_DIR/sweep.html
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial

from rlhf.base.command import Result, build_command_parser, run_to_exit_code
from rlhf.base.user_paths import expand_user_path
from rlhf.config.freeze import FROZEN
from rlhf.report.compare_runs import print_comparison
from rlhf.report.run_page import write_report
from rlhf.run.console import build_console
from rlhf.run.results import read_run_result
from rlhf.run.step_alarms import read_alarms


def main(arguments: Sequence[str]) -> int:
    """Write a report, or compare the runs that the command names; return the exit code."""
    parser = build_command_parser("rlhf.report", __doc__, has_json=True)
    parser.add_argument("paths", nargs="+", metavar="RUN_DIR|SWEEP_DIR")
    parser.add_argument("--html", metavar="FILE", help="write the comparison to this page")
    options = parser.parse_args(arguments)
    work = partial(_report_or_compare, options.paths, options.html)
    return run_to_exit_code(work, as_json=options.json)


def _report_or_compare(words: Sequence[str], html: str | None) -> Result:
    paths = [expand_user_path(word, key="RUN_DIR") for word in words]
    if html is None and len(paths) == 1 and (paths[0] / FROZEN).is_file():
        page, result = write_report(paths[0]), read_run_result(paths[0])
        build_console(is_main=True, log_every=1).say(f"wrote {page}")
        alarms = [alarm._asdict() for alarm in read_alarms(paths[0])]
        return Result({"run": str(paths[0]), "page": str(page), "alarms": alarms, "result": result})
    file = None if html is None else expand_user_path(html, key="--html")
    return Result(print_comparison(paths, file))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
