"""The rows that the parts of a check measure, as lines of JSON, as a JSON file and as a page."""

from __future__ import annotations

import faulthandler
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
from rlhf.base.packaged_yaml import read_yaml_beside
from rlhf.run.jsonl import JsonlWriter
from rlhf.run.model_card import markdown_table
from rlhf.run.results import write_json

CARD = "card"  # the row of the part "machine" that names the GPU
QUIET = 720.0  # seconds in which a part must measure a row or start a run
JSON, PAGE = "gpu_check.json", "gpu_check.md"
SHAPES: Mapping[str, Any] = read_yaml_beside(__file__, "shapes.yaml")


class Size(StrEnum):
    """The size of the models to measure; memory and speed of tiny models mean little."""

    full = "full"
    tiny = "tiny"


@dataclass(frozen=True, kw_only=True)
class CheckPart:
    """A part of the check: its module in ``parts``, its title and description."""

    name: str
    title: str
    about: str
    module: str
    remedies: Mapping[str, str] = field(default_factory=dict)
    """Overrides of launch.py that avoid what failed, by words in the failed row's name."""

    def find_remedy(self, row: CheckRow) -> str:
        """Return the overrides that avoid what failed in ``row``."""
        found = (text for words, text in self.remedies.items() if words in row.what)
        return next(found, f"nothing helps against {self.title}, {row.what}")


@dataclass(frozen=True, kw_only=True)
class CheckSetting:
    """The settings with which a part runs: its name, its folder, and the size of its models."""

    part: str
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


MARKS = {RowVerdict.passed: "✓ passed", RowVerdict.failed: "**✗ failed**"}


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
    faulthandler.enable()  # a crash prints the stacks too
    with closing(JsonlWriter(path)) as writer:
        extend_deadline()
        for task in tasks:
            writer.write(asdict(measure_row(task)))
            extend_deadline()


def extend_deadline(seconds: float = 0.0) -> None:
    """Let this process print the stacks of its threads, and end, in ``seconds``, at least QUIET.

    A later call replaces the deadline of an earlier one.
    """
    faulthandler.dump_traceback_later(max(QUIET, seconds), exit=True)


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
    def failed_rows(self) -> list[CheckRow]:
        """Return the rows that failed."""
        return [row for row in self.rows if row.verdict is RowVerdict.failed]

    @property
    def verdict(self) -> RowVerdict:
        """Return the first of failed, passed, measured and skipped that any row has."""
        order = (RowVerdict.failed, RowVerdict.passed, RowVerdict.measured, RowVerdict.skipped)
        return min((row.verdict for row in self.rows), key=order.index)


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
    write_json(folder / JSON, results_as_json(check))
    write_text_atomically(folder / PAGE, "\n".join(_page_lines(check)))


def results_as_json(check: CheckResults) -> dict[str, Any]:
    """Return the content of gpu_check.json."""
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


def _page_lines(check: CheckResults) -> Iterator[str]:
    """Yield the lines of the page: advice, card, failed rows, and a section for each part."""
    yield f"{advice(check)}\n"
    yield "# GPU check\n"
    cards = [row.figure for part in check.parts for row in part.rows if row.what == CARD]
    yield from (f"Card: **{card}**.\n" for card in cards)
    minutes = sum(part.seconds for part in check.parts) / 60
    yield f"Started {check.started} with `{check.command}`, {minutes:.1f} minutes so far. "
    yield "docs/operations.md explains the page; `gpu_check.json` has all figures for programs.\n"
    if check.failed_parts:
        yield "## What failed\n"
        for each in check.failed_parts:
            for row in each.failed_rows:
                yield f"- **{each.part.title}, {row.what}**: {row.figure}{expected_suffix(row)}"
        yield ""
    for each in check.parts:
        yield f"## {each.part.title}\n"
        counted = Counter(row.verdict for row in each.rows)
        counts = ", ".join(f"{counted[kind]} {kind}" for kind in RowVerdict if counted[kind])
        yield f"{counts}; {each.seconds:.1f} seconds. {each.part.about}\n"
        rows = [
            (*(r.what, r.figure, r.expected), MARKS.get(r.verdict, r.verdict), f"{r.seconds:.1f}")
            for r in each.rows
        ]
        yield markdown_table(("", "figure", "expected", "verdict", "seconds"), rows) + "\n"


def advice(check: CheckResults) -> str:
    """Return which parts work on this machine, which do not, and the overrides to set."""
    named = {
        "Works here": (RowVerdict.passed, RowVerdict.measured),
        "Cannot run here": (RowVerdict.skipped,),
        "Fails": (RowVerdict.failed,),
    }
    titles = {
        words: [each.part.title for each in check.parts if each.verdict in verdicts]
        for words, verdicts in named.items()
    } | {"Not run yet": check.waiting}
    found = "".join(f"{words}: {', '.join(names)}. " for words, names in titles.items() if names)
    words = {each.part.find_remedy(row): None for each in check.parts for row in each.failed_rows}
    return f"{found}Set: {'; '.join(words) or 'nothing'}."


def expected_suffix(row: CheckRow) -> str:
    """Return " (expected: ...)", to print after the row's figure; "" if nothing was expected."""
    return f" (expected: {row.expected})" if row.expected else ""
