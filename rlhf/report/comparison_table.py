"""Show a comparison of settings on the terminal, within 80 columns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from rlhf.report.comparison import Setting, estimate_text
from rlhf.report.differences import SettingsComparison

if TYPE_CHECKING:
    from rich.table import Table


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
