"""Print a comparison of runs, and write its page; for a sweep, also write its files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import yaml

from rlhf.base.atomic import replace_atomically
from rlhf.base.errors import ConfigError
from rlhf.checkpoint.results import write_json
from rlhf.config.freeze import FROZEN
from rlhf.report.comparison import (
    comparison_json,
    find_run_folders,
    group_by_setting,
    read_run,
)
from rlhf.report.comparison_table import comparison_table, legend_lines, note_lines
from rlhf.report.differences import compare_with_first
from rlhf.report.sweep_page import sweep_page, write_sweep_report
from rlhf.tracking.console import build_console


def compare(paths: Sequence[Path], html: Path | None = None) -> None:
    """Print a comparison of the runs in ``paths``, and write it as a page to the file ``html``.

    If ``paths`` is one sweep, its page and its numbers are also written there.

    Raises:
        CheckpointError: if a path holds no run.
        ConfigError: if the folder of ``html`` does not exist.
    """
    if html is not None and not html.parent.is_dir():
        raise ConfigError(f"--html={html}: there is no folder {html.parent}; make it first")
    settings = group_by_setting([read_run(folder) for folder in find_run_folders(paths)])
    found = compare_with_first(settings)
    console = build_console(is_main=True, log_every=1)
    for line in legend_lines(settings):
        console.say(line)
    console.show(comparison_table(settings, found))
    for line in note_lines(settings, found):
        console.say(line)
    if len(paths) == 1 and not (paths[0] / FROZEN).exists():
        content = comparison_json(settings)
        write_json(paths[0] / "result.json", content)
        with replace_atomically(paths[0] / "multirun.yaml") as building:
            building.write_text(yaml.safe_dump(content, sort_keys=False))
        console.say(f"wrote {write_sweep_report(paths[0], settings)}")
    if html is not None:
        count = sum(len(setting.runs) for setting in settings)
        with replace_atomically(html) as building:
            building.write_text(sweep_page(f"{count} runs", settings), encoding="utf-8")
        console.say(f"wrote {html}")
