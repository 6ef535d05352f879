"""Print a comparison of runs; for a sweep, also write its page and files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import yaml

from rlhf.base.atomic import replace_atomically
from rlhf.checkpoint.results import write_json
from rlhf.config.freeze import FROZEN
from rlhf.report.comparison import (
    comparison_json,
    comparison_table,
    find_run_folders,
    group_by_setting,
    read_run,
)
from rlhf.report.sweep_page import write_sweep_report
from rlhf.tracking.console import build_console


def compare(paths: Sequence[Path]) -> None:
    """Print a comparison of the runs in ``paths``; if this is one sweep, also write it there.

    Raises:
        CheckpointError: if a path holds no run.
    """
    settings = group_by_setting([read_run(folder) for folder in find_run_folders(paths)])
    console = build_console(is_main=True, log_every=1)
    console.show(comparison_table(settings))
    unfinished = [run for setting in settings for run in setting.runs if not run.measures]
    for run in unfinished:
        console.say(f"no result: {run.folder}")
    if len(paths) == 1 and not (paths[0] / FROZEN).exists():
        content = comparison_json(settings)
        write_json(paths[0] / "result.json", content)
        with replace_atomically(paths[0] / "multirun.yaml") as building:
            building.write_text(yaml.safe_dump(content, sort_keys=False))
        console.say(f"wrote {write_sweep_report(paths[0], settings)}")
