"""The rows that the parts of a check measure, as lines of JSON, as a JSON file and as a page."""

from __future__ import annotations

import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, NamedTuple

from rlhf.base.atomic import write_text_atomically
from rlhf.base.errors import RlhfError
from rlhf.base.foreign_errors import reason_of
from rlhf.run.jsonl import JsonlWriter
from rlhf.run.results import write_json

CARD = "card"  # the row of the part "machine" that names the GPU
JSON, PAGE = "gpu_check.json", "gpu_check.md"


class Size(StrEnum):
    """The size of the models to measure; memory and speed of tiny models mean little."""

    full = "full"
    tiny = "tiny"


@dataclass(frozen=True, kw_only=True)
class CheckPart:
    """A part of the check: its module in ``parts``, its title, time limit and description."""

    name: str
    title: str
    minutes: float
    about: str


@dataclass(frozen=True, kw_only=True)
class CheckSetting:
    """The settings with which a part runs: its folder, which exists, and the size of its models."""

    folder: Path
    size: Size


class RowVerdict(StrEnum):
    """The outcome of one task on this machine."""

    passed = "passed"
    failed = "failed"
    measured = "measured"
    """A figure without an expectation."""
    skipped = "skipped"
    """This machine or version cannot do the task, and the figure is the reason; no failure."""


MARKS = {
    RowVerdict.passed: "✓ passed",
    RowVerdict.failed: "**✗ failed**",
    RowVerdict.measured: "measured",
    RowVerdict.skipped: "skipped",
}


@dataclass(frozen=True, kw_only=True)
class Finding:
    """The result of one task: ``figure``, a text for readers, and ``numbers`` for programs."""

    figure: str
    expected: str = ""
    verdict: RowVerdict
    numbers: Mapping[str, float] = field(default_factory=dict)


class Task(NamedTuple):
    """One measurement of a part; an exception in ``measure`` becomes a failed row."""

    what: str
    measure: Callable[[], Finding]


@dataclass(frozen=True, kw_only=True)
class CheckRow(Finding):
    """A finding, with the name of its task and the seconds that the task took."""

    what: str
    seconds: float


def checked_finding(is_right: bool, figure: str, expected: str, **numbers: float) -> Finding:
    """Return a finding that passed if ``is_right``, and failed otherwise."""
    verdict = RowVerdict.passed if is_right else RowVerdict.failed
    return Finding(figure=figure, expected=expected, verdict=verdict, numbers=numbers)


def measured_finding(figure: str, **numbers: float) -> Finding:
    """Return a finding that only reports a figure, without an expected value."""
    return Finding(figure=figure, verdict=RowVerdict.measured, numbers=numbers)


def skipped_finding(figure: str, expected: str = "") -> Finding:
    """Return the finding of a skipped task; ``figure`` says why the task cannot run here."""
    return Finding(figure=figure, expected=expected, verdict=RowVerdict.skipped)


def measure_and_write_rows(path: Path, tasks: Iterable[Task]) -> None:
    """Measure every task; append each row to ``path`` at once, so that a crash loses no row."""
    with closing(JsonlWriter(path)) as writer:
        for task in tasks:
            writer.write(asdict(measure_row(task)))


def measure_row(task: Task) -> CheckRow:
    """Measure ``task``; return its row, which is a failed row if ``task.measure`` raises."""
    began = time.monotonic()
    try:
        finding = task.measure()
    except Exception as error:
        if not isinstance(error, RlhfError):
            traceback.print_exception(error)
        finding = Finding(figure=reason_of(error), verdict=RowVerdict.failed)
    return CheckRow(what=task.what, seconds=time.monotonic() - began, **vars(finding))


@dataclass(frozen=True, kw_only=True)
class PartResult:
    """The result of a part, for the page and the JSON file; rows are in order of measurement."""

    part: CheckPart
    rows: Sequence[CheckRow]
    seconds: float

    @property
    def verdict(self) -> RowVerdict:
        """Return the first of failed, passed, measured and skipped that any row has."""
        verdicts = {row.verdict for row in self.rows}
        if RowVerdict.failed in verdicts:
            return RowVerdict.failed
        kinds = (RowVerdict.passed, RowVerdict.measured, RowVerdict.skipped)
        return next(kind for kind in kinds if kind in verdicts)


@dataclass(frozen=True, kw_only=True)
class CheckResults:
    """The content of gpu_check.md: start time and command of a check, and its parts' results."""

    started: str
    command: str
    parts: Sequence[PartResult]
    waiting: Sequence[str]
    """Names of the parts that have not run yet."""

    @property
    def failed_parts(self) -> list[PartResult]:
        """Return the parts that failed."""
        return [part for part in self.parts if part.verdict is RowVerdict.failed]


def write_results(folder: Path, check: CheckResults) -> None:
    """Write gpu_check.json and gpu_check.md to ``folder``; replace each older file atomically."""
    write_json(folder / JSON, _results_as_json(check))
    lines = [*_page_head(check), *(line for part in check.parts for line in _part_section(part))]
    write_text_atomically(folder / PAGE, "\n".join(lines))


def _results_as_json(check: CheckResults) -> dict[str, Any]:
    parts = [
        {"name": each.part.name, "verdict": each.verdict, "seconds": each.seconds}
        | {"rows": [asdict(row) for row in each.rows]}
        for each in check.parts
    ]
    return {
        "started": check.started,
        "command": check.command,
        "failed": [each.part.name for each in check.failed_parts],
        "waiting": list(check.waiting),
        "parts": parts,
    }


def _page_head(check: CheckResults) -> Iterator[str]:
    """Yield the page's lines before its sections: summary, card, failed rows, table of parts."""
    yield "# GPU check\n"
    yield f"{summary_sentence(check)}\n"
    cards = [row.figure for part in check.parts for row in part.rows if row.what == CARD]
    yield from (f"Card: **{card}**.\n" for card in cards)
    yield f"Started {check.started} with `{check.command}`. "
    yield "docs/operations.md explains the page; `gpu_check.json` has all figures for programs.\n"
    if check.failed_parts:
        yield "## What failed\n"
        for each in check.failed_parts:
            for row in each.rows:
                if row.verdict is RowVerdict.failed:
                    what = f"{each.part.title}, {row.what}"
                    yield f"- **{what}**: {row.figure}{expected_suffix(row)}"
        yield ""
    yield "## Parts\n"
    yield from _markdown_lines(
        ("part", "rows", "verdict", "seconds"),
        [
            (_link_to_heading(each.part.title), _count_verdicts(each), *_verdict_and_seconds(each))
            for each in check.parts
        ],
    )
    yield ""


def summary_sentence(check: CheckResults) -> str:
    """Return how many parts passed, in how many minutes, and which have not run yet."""
    ended, seconds = len(check.parts), sum(part.seconds for part in check.parts)
    passed = ended - len(check.failed_parts)
    waiting = f"; not run yet: {', '.join(check.waiting)}" if check.waiting else ""
    return (
        f"{passed} of {ended} parts have no failed row "
        f"({int(seconds) // 60}:{int(seconds) % 60:02d} minutes){waiting}."
    )


def _part_section(found: PartResult) -> Iterator[str]:
    yield f"## {found.part.title}\n"
    yield f"{found.part.about}\n"
    yield from _markdown_lines(
        ("", "figure", "expected", "verdict", "seconds"),
        [(row.what, row.figure, row.expected, *_verdict_and_seconds(row)) for row in found.rows],
    )
    yield ""


def _verdict_and_seconds(each: CheckRow | PartResult) -> tuple[str, str]:
    """Return the last two cells of a row in the page's tables: verdict and seconds."""
    return MARKS[each.verdict], f"{each.seconds:.1f}"


def _count_verdicts(part: PartResult) -> str:
    counted = Counter(row.verdict for row in part.rows)
    return ", ".join(f"{counted[each]} {each}" for each in RowVerdict if counted[each])


def expected_suffix(row: CheckRow) -> str:
    """Return " (expected: ...)", to print after the row's figure; "" if nothing was expected."""
    return f" (expected: {row.expected})" if row.expected else ""


def _markdown_lines(header: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yield the lines of a Markdown table whose last column, seconds, is right-aligned."""
    rules = ["---"] * (len(header) - 1) + ["---:"]
    for line in (header, rules, *rows):
        cells = (cell.replace("|", "\\|").replace("\n", " ") for cell in line)
        yield f"| {' | '.join(cells)} |"


def _link_to_heading(title: str) -> str:
    """Return a Markdown link to a heading of the page, by the anchor of GitHub and MkDocs."""
    words = "".join(char for char in title.lower() if char.isalnum() or char in " -")
    return f"[{title}](#{words.replace(' ', '-')})"
