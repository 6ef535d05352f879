"""Watch a run or a sweep while it runs, or look at a finished one.

python -m rlhf.watch RUN_DIR                serve a page on this machine, and print its address
python -m rlhf.watch SWEEP_DIR              the same, with a row for each job
python -m rlhf.watch RUN_DIR --beside RUN_DIR ...   the same, with the curves of other runs
python -m rlhf.watch RUN_DIR --terminal     show the run in the terminal instead; Ctrl-C ends
python -m rlhf.watch RUN_DIR --json         print the present state, and end

Only files are read, so the run may be on another machine that shares the folder.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhf.base.command import Result, build_command_parser, run_to_exit_code
from rlhf.base.intervals import mean_of
from rlhf.base.stored_files import find_entries
from rlhf.base.user_paths import expand_user_path
from rlhf.config.freeze import FROZEN, read_frozen_keys
from rlhf.config.run_dir import LATEST, LOCK, RUNS, find_run_dir
from rlhf.report.charts import Point
from rlhf.run.console import Console, literal_text
from rlhf.watch.live_run import LiveRun, LiveSweep
from rlhf.watch.live_server import WatchServer
from rlhf.watch.progress import PhaseProgress, is_process_alive, short_number_text, time_text

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table
    from rich.text import Text

REFRESH_SECONDS = 2.0
BARS = "▁▂▃▄▅▆▇█"
MOST_BARS = 32  # most bars of a trend
PROGRESS_WIDTH = 16  # characters of a progress bar
LINE_WIDTH = 76  # characters per line of text
MOST_LINES = 2  # most lines of an answer or a fault
ALARM_LINES = (3, 1)  # most lines of the last alarm, with its advice, and of the alarm before it


def show_in_terminal(folder: Path) -> None:
    """Show the run or sweep in ``folder`` until Ctrl-C; print once if stdout is no terminal."""
    draw = build_draw_function(folder)
    console = Console()
    with console.full_screen() as show:
        show(draw())
        while console.is_terminal:
            time.sleep(REFRESH_SECONDS)
            show(draw())


def build_draw_function(folder: Path) -> Callable[[], RenderableType]:
    """Return a function that reads what is new in ``folder``, and returns what to display."""
    if (folder / FROZEN).is_file():
        run = LiveRun(folder)
        return lambda: _draw_run(run)
    sweep = LiveSweep(folder)
    return lambda: _draw_sweep(sweep)


def draw_trend(points: Sequence[Point]) -> str:
    """Return the finite values of a curve as bars; a bar shows the mean of successive values."""
    values = [value for _, value in points if math.isfinite(value)]
    size = -(-len(values) // MOST_BARS) if values else 1
    means = [mean_of(values[i : i + size]) for i in range(0, len(values), size)]
    low, high = min(means, default=0.0), max(means, default=0.0)
    steps = (len(BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(BARS[round((value - low) * steps)] for value in means)


def _draw_run(run: LiveRun) -> RenderableType:
    from rich.console import Group

    run.poll()
    headline = run.headline()
    newest = list(zip(run.alarms[::-1], ALARM_LINES, strict=False))
    alarms = [_paragraph(alarm.line, style="red", lines=lines) for alarm, lines in newest[::-1]]
    head: list[RenderableType] = [
        _paragraph(run.title, style="bold"),
        _paragraph(headline.text, style="yellow" if headline.is_doubtful else ""),
        *(_paragraph(fault, style="red", lines=MOST_LINES) for fault in run.faults),
        _phase_table(run.progress.phases()),
    ]
    answer = list(_draw_newest_answer(run))
    blocks: list[Sequence[RenderableType]] = [head, [_metric_table(run)], alarms, answer]
    return Group(*(Group(*block, "") for block in blocks if block))


def _phase_table(phases: Sequence[PhaseProgress]) -> Table:
    table = _create_table("phase", "", "step", "s/step", "planned", "time", "planned")
    for phase in phases:
        share = 1.0 if phase.state == "done" else phase.step / phase.steps if phase.steps else 0.0
        full = min(PROGRESS_WIDTH, int(share * PROGRESS_WIDTH))
        table.add_row(
            phase.name,
            "█" * full + "░" * (PROGRESS_WIDTH - full),
            f"{phase.step}/{phase.steps or '?'}",
            short_number_text(phase.pace),
            short_number_text(phase.planned_pace),
            phase.taken_or_left,
            time_text(phase.planned),
        )
    return table


def _metric_table(run: LiveRun) -> Table:
    table, curves = _create_table("", "", ""), run.curves
    for metric, _, value in run.key_metric_values():
        table.add_row(metric.title, value, draw_trend(curves[metric.name]))
    return table


def _draw_newest_answer(run: LiveRun) -> Iterator[Text]:
    if not run.newest_answers:
        return
    prompt, answer = next(iter(run.newest_answers.items()))
    yield _paragraph(prompt, style="bold", lines=1)
    for sample in (run.first_answers[prompt], answer):
        yield _paragraph(f"step {sample['step']}: {sample['response']}", lines=MOST_LINES)


def _paragraph(text: str, *, style: str = "", lines: int | None = None) -> Text:
    """Return ``text`` without line breaks or markup, cut after about ``lines`` lines."""
    most = (lines or MOST_LINES) * LINE_WIDTH
    words = " ".join(text[: 4 * most].split())  # splitting millions of characters takes seconds
    return literal_text(words if len(words) <= most else words[: most - 1] + "…", style=style)


def _create_table(*titles: str) -> Table:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, show_header=any(titles), header_style="dim")
    for index, title in enumerate(titles):
        table.add_column(title, no_wrap=index > 0, overflow="fold")
    return table


def _draw_sweep(sweep: LiveSweep) -> RenderableType:
    from rich.console import Group

    sweep.poll()
    table = _create_table("job", "state", "step", "so far")
    for row in sweep.rows:
        table.add_row(
            *(_paragraph(cell) for cell in (row.name, row.state.word, row.step, row.reached))
        )
    return Group(_paragraph(sweep.headline, style="bold"), table)


def main(arguments: Sequence[str]) -> int:
    """Serve the page or fill the terminal until Ctrl-C, or print JSON; return the exit code."""
    parser = build_command_parser("rlhf.watch", __doc__, has_json=True)
    parser.add_argument(
        "folder", nargs="?", metavar="RUN_DIR|SWEEP_DIR", help="default: runs/latest"
    )
    views = parser.add_mutually_exclusive_group()
    views.add_argument("--terminal", action="store_true", help="use the terminal instead of a page")
    views.add_argument("--port", type=int, help="port of the page; default: a free port from 7860")
    parser.add_argument(
        "--beside", type=Path, nargs="+", metavar="RUN_DIR", default=[], help="other runs to draw"
    )
    options = parser.parse_args(arguments)
    if options.beside and (options.terminal or options.json):
        parser.error("--beside draws curves on the page: give no --terminal or --json with it")
    with suppress(KeyboardInterrupt):
        return run_to_exit_code(lambda: _watch(options), as_json=options.json)
    return 0


def _watch(options: argparse.Namespace) -> Result | None:
    starting = _find_newest_running() if options.folder in (None, str(LATEST)) else None
    folder = (starting or find_run_dir(options.folder)).resolve()  # runs/latest may change
    if options.json:
        return Result(read_snapshot(folder))
    if options.terminal:
        show_in_terminal(folder)
        return None
    beside = [expand_user_path(other, key="--beside").resolve() for other in options.beside]
    for other in beside:
        read_frozen_keys(other)  # raises an error if the folder is no run
    with WatchServer(folder, options.port, beside) as server:
        Console().say(
            f"open {server.address} in a browser; Ctrl-C ends. Without a browser: add --terminal"
        )
        server.serve_forever()
    return None


def _find_newest_running() -> Path | None:
    """Return the run in runs/ that began last, if it runs: runs/latest names it after a step."""
    locks = sorted(find_entries(RUNS, f"*/*/{LOCK}"), key=lambda lock: lock.stat().st_mtime)
    return next((lock.parent for lock in locks[-1:] if is_process_alive(lock.parent)), None)


def read_snapshot(folder: Path) -> dict[str, Any]:
    """Return the state of the run or sweep in ``folder`` as JSON data."""
    if not (folder / FROZEN).is_file():
        jobs = [
            {"job": row.name, "state": row.state.word, "step": row.step, "so_far": row.reached}
            for row in LiveSweep(folder).rows
        ]
        return {"folder": str(folder), "jobs": jobs}
    run = LiveRun(folder)
    run.poll()
    progress = run.progress
    return {
        "folder": str(folder),
        "state": progress.state().word,
        "headline": run.headline().text,
        "phase": progress.phase,
        "hours_left": progress.hours_left(),
        "phases": [phase._asdict() for phase in progress.phases()],
        "metrics": progress.latest,
        "alarms": [alarm._asdict() for alarm in run.alarms],
        "faults": run.faults,
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
