"""Print a comparison of runs within 80 columns, and write its page; for a sweep, also its files."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import yaml

from rlhf.base.atomic import write_text_atomically
from rlhf.base.errors import ConfigError
from rlhf.config.freeze import FROZEN
from rlhf.report.comparison import (
    Setting,
    comparison_json,
    estimate_text,
    find_run_folders,
    group_by_setting,
    read_run,
)
from rlhf.report.differences import SettingsComparison, compare_with_first
from rlhf.report.sweep_page import sweep_page, write_sweep_report
from rlhf.run.console import build_console
from rlhf.run.results import write_json

if TYPE_CHECKING:
    from rich.table import Table


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
        text = yaml.safe_dump(content, sort_keys=False)
        write_text_atomically(paths[0] / "multirun.yaml", text)
        console.say(f"wrote {write_sweep_report(paths[0], settings)}")
    if html is not None:
        count = sum(len(setting.runs) for setting in settings)
        write_text_atomically(html, sweep_page(f"{count} runs", settings))
        console.say(f"wrote {html}")


def legend_lines(settings: Sequence[Setting]) -> Iterator[str]:
    """Yield a line for each setting: its number in the table, its runs and its differing keys."""
    yield "Settings"
    for number, setting in enumerate(settings, 1):
        yield (
            f"  {number:>2}  {len(setting.finished_runs())} of {len(setting.runs)} runs  "
            f"{setting.label}"
        )


def comparison_table(settings: Sequence[Setting], found: SettingsComparison) -> Table:
    """Return a table of all measures: means with 95 % intervals, and differences from the first."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD)
    reference = next((n for n, s in enumerate(settings, 1) if s is found.reference), 1)
    columns = ("measure", "setting", "mean", f"difference from {reference}", "")
    for title in columns:
        table.add_column(title, justify="left" if title in {"measure", ""} else "right")
    for title in found.titles:
        names = iter((title,))
        for number, setting in enumerate(settings):
            if (mean := setting.estimates().get(title)) is None:
                continue
            told = found.differences.get((number, title))
            cells = [estimate_text(told.estimate, "+")] if told else [""]
            table.add_row(
                *(next(names, ""), str(number + 1), estimate_text(mean)),
                *(*cells, found.verdict(number, title)),
            )
        table.add_section()
    return table


def note_lines(settings: Sequence[Setting], found: SettingsComparison) -> Iterator[str]:
    """Yield sentences about the table: how to read it, and what is not compared, and why."""
    if found.tests:
        yield (
            "± is the 95 % interval over seeds. higher, lower: a difference that is told although "
            f"{found.tests} were tested (Holm's correction at 5 %); -: none can be told."
        )
    if found.differences and not found.tests:
        yield "Fewer than three seeds tell nothing about a difference: give seed=1,2,3 or more."
    for title, reason in found.left_out.items():
        yield f"not compared: {title} ({reason})"
    for run in (run for setting in settings for run in setting.runs if not run.measures):
        yield f"no result: {run.folder}"
