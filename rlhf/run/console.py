"""Terminal output of runs and commands: lines, tables and progress.

rich is imported when a console is created, so that importing this module is fast.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TextIO

from rlhf.base.packaged_yaml import read_yaml_beside
from rlhf.base.safe_text import sanitize_for_terminal

if TYPE_CHECKING:
    from rich import progress
    from rich.console import Console as RichConsole
    from rich.console import RenderableType
    from rich.text import Text
    from rich.tree import Tree

SECONDS_BETWEEN_LINES = 30.0


class KeyMetric(NamedTuple):
    """A metric to show on the progress line, with its label there and its title on pages."""

    name: str
    label: str
    format: str
    title: str


KEY_METRICS: Mapping[str, Sequence[KeyMetric]] = {
    phase: [KeyMetric(name, *shown) for name, shown in metrics.items()]
    for phase, metrics in read_yaml_beside(__file__, "key_metrics.yaml").items()
}


class Console:
    """A console that prints lines, tables and progress (a bar on a terminal, otherwise lines).

    A rank other than 0 has a ``quiet`` console, which prints nothing.
    """

    def __init__(
        self,
        *,
        log_every: int | None = 1,
        file: TextIO | None = None,
        force_terminal: bool | None = None,
        width: int | None = None,
        quiet: bool = False,
    ) -> None:
        from rich.console import Console as RichConsole

        self._log_every = log_every
        self._rich: RichConsole = RichConsole(
            file=file,
            force_terminal=force_terminal,
            force_jupyter=False,  # in a notebook each line would be a block of its own
            width=width,
            quiet=quiet,
            highlight=False,
        )

    def say(self, text: str) -> None:
        """Print one plain line without wrapping it, so that it can be copied."""
        self._rich.print(literal_text(text), soft_wrap=True)

    def show(self, *renderables: RenderableType) -> None:
        """Print tables or other objects that rich can render."""
        for renderable in renderables:
            self._rich.print(renderable)

    def print_table(self, title: str, rows: Sequence[Mapping[str, object]]) -> None:
        """Print a table of ``rows``, which all have the keys of the first; right-align numbers."""
        from rich import box
        from rich.table import Table

        if not rows:
            self.say(f"{title}: none")
            return
        columns = list(rows[0])
        table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
        for column in columns:
            is_numeric = all(isinstance(row[column], int | float | None) for row in rows)
            table.add_column(column, justify="right" if is_numeric else "left")
        for row in rows:
            table.add_row(*(literal_text(_format_cell(row[column])) for column in columns))
        self._rich.print(table)

    @property
    def is_terminal(self) -> bool:
        """Return True if the output goes to a terminal, where lines can be redrawn."""
        return self._rich.is_terminal

    @contextmanager
    def full_screen(self) -> Generator[Callable[[RenderableType], None]]:
        """Yield a function that fills the terminal with a renderable, or prints it in a file."""
        from rich.live import Live

        if not self.is_terminal:
            yield self._rich.print
            return
        with Live(console=self._rich, screen=True, auto_refresh=False) as live:
            yield partial(live.update, refresh=True)

    @contextmanager
    def progress(self, phase: str, total: int) -> Generator[_BarProgress | _LineProgress]:
        """Show the progress of a phase of ``total`` steps within the context."""
        if self._rich.is_terminal and not self._rich.quiet:
            with _build_rich_progress(self._rich) as bars:
                yield _BarProgress(bars, phase, total)
        else:
            lines = _LineProgress(self, phase, total, log_every=self._log_every)
            try:
                yield lines
            finally:
                lines.close()


def build_config_tree(title: str, values: Mapping[str, Any]) -> Tree:
    """Build a printable tree of nested values, with groups after single values."""
    from rich.tree import Tree

    from rlhf.config.schema.keys import format_value

    tree = Tree(literal_text(title, style="bold"), guide_style="dim")
    groups = {key: value for key, value in values.items() if isinstance(value, Mapping)}
    for key, value in values.items():
        if key not in groups:
            tree.add(literal_text(f"{key}: {format_value(value)}"))
    for key, value in groups.items():
        tree.add(build_config_tree(key, value))
    return tree


class _BarProgress:
    """A progress bar: one line on a terminal that is redrawn."""

    def __init__(self, bars: progress.Progress, phase: str, total: int) -> None:
        self._bars = bars
        self._phase = phase
        self._values: dict[str, float] = {}  # latest value of each metric; a step may lack some
        self._task = bars.add_task(phase, total=total, metrics="")

    def advance(self, step: int, values: Mapping[str, float]) -> None:
        """Move the bar to ``step``."""
        self._values.update(values)
        metrics = _key_metrics_text(self._phase, self._values, separator=" ")
        self._bars.update(self._task, completed=step, metrics=metrics)


class _LineProgress:
    """Progress for logs: a line every few steps or seconds, and a line for the last step."""

    def __init__(self, console: Console, phase: str, total: int, *, log_every: int | None) -> None:
        self._console = console
        self._values: dict[str, float] = {}  # latest value of each metric; a step may lack some
        self._phase = phase
        self._total = total
        self._log_every = log_every
        self._step = 0
        self._is_printed = True
        self._due = time.monotonic() + SECONDS_BETWEEN_LINES

    def advance(self, step: int, values: Mapping[str, float]) -> None:
        """Print a line every ``log_every`` steps or, if that is None, every half minute."""
        self._values.update(values)
        self._step = step
        self._is_printed = False
        every = self._log_every
        if time.monotonic() >= self._due if every is None else step % every == 0:
            self._print_line()

    def close(self) -> None:
        """Print a line for the last step if it has not been printed."""
        if not self._is_printed:
            self._print_line()

    def _print_line(self) -> None:
        self._is_printed, self._due = True, time.monotonic() + SECONDS_BETWEEN_LINES
        metrics = _key_metrics_text(self._phase, self._values, separator="  ")
        self._console.say(f"{self._phase} {self._step}/{self._total}  {metrics}".rstrip())


def _key_metrics_text(phase: str, values: Mapping[str, float], *, separator: str) -> str:
    """Return the key metrics of a phase that are in ``values``, each after its label."""
    return separator.join(
        f"{metric.label} {values[metric.name]:{metric.format}}"
        for metric in KEY_METRICS[phase]
        if metric.name in values
    )


def _build_rich_progress(console: RichConsole) -> progress.Progress:
    from rich import progress

    return progress.Progress(
        progress.TextColumn("[bold]{task.description}"),
        # The bar gets only the width that other columns leave: metrics matter more.
        progress.BarColumn(bar_width=None),
        progress.MofNCompleteColumn(),
        progress.TextColumn("{task.fields[metrics]}", markup=False),
        progress.TimeRemainingColumn(compact=True),
        console=console,
        expand=True,
        # Drawing a frame blocks the training loop: two frames per second are enough.
        refresh_per_second=2,
        # By default the time left is shown only if a step takes less than 30 seconds.
        speed_estimate_period=math.inf,
    )


def _format_cell(value: object) -> str:
    if value is None:
        return ""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def literal_text(text: str, *, style: str = "") -> Text:
    """Return ``text`` as rich text without markup, control characters and secrets."""
    from rich.text import Text

    return Text(sanitize_for_terminal(text), style=style)
