"""Measure the tasks of a check as rows; write rows as lines of JSON, as a JSON file and a page."""

from __future__ import annotations

import faulthandler
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

from rlhf.base.atomic import write_text_atomically
from rlhf.base.errors import RlhfError
from rlhf.base.foreign_errors import reason_of
from rlhf.base.packaged_yaml import read_yaml_beside
from rlhf.run.jsonl import JsonlWriter
from rlhf.run.model_card import markdown_table
from rlhf.run.results import write_json

CARD = "card"  # the row of the part "machine" that names the GPU
MOST_QUIET = 720.0  # seconds within which a part must measure a row or start a run
JSON, PAGE = "gpu_check.json", "gpu_check.md"


Size = StrEnum("Size", "full tiny")
"""The size of the models in the check; memory and speed of tiny models mean little."""


class RowVerdict(StrEnum):
    """The outcome of one task on this machine."""

    passed = "passed"
    failed = "failed"
    measured = "measured"  # a figure without an expectation
    skipped = "skipped"  # this machine or version cannot do the task, for the reason in the figure


MARKS = {RowVerdict.passed: "✓ passed", RowVerdict.failed: "**✗ failed**"}


@dataclass(frozen=True, kw_only=True)
class CheckRow:
    """The result of one task: ``figure``, a text for readers, and ``numbers`` for programs."""

    figure: str
    expected: str = ""
    verdict: RowVerdict
    numbers: Mapping[str, float] = field(default_factory=dict)
    what: str = ""
    """The name of the task; ``measure_row`` adds this name and the seconds."""
    seconds: float = 0.0

    @property
    def text(self) -> str:
        """Return the figure, with the expected figure in brackets if there is one."""
        return f"{self.figure} (expected: {self.expected})" if self.expected else self.figure


# The name and the function of one measurement of a part; an exception becomes a failed row.
Task = tuple[str, Callable[[], CheckRow]]


def checked_row(is_right: bool, figure: str, expected: str, **numbers: float) -> CheckRow:
    """Return a row that passed if ``is_right``, and failed otherwise."""
    verdict = RowVerdict.passed if is_right else RowVerdict.failed
    return CheckRow(figure=figure, expected=expected, verdict=verdict, numbers=numbers)


def measured_row(figure: str, **numbers: float) -> CheckRow:
    """Return a row that only reports a figure, without an expected value."""
    return CheckRow(figure=figure, verdict=RowVerdict.measured, numbers=numbers)


def skipped_row(figure: str, expected: str = "") -> CheckRow:
    """Return the row of a skipped task; ``figure`` is the reason why it cannot run here."""
    return CheckRow(figure=figure, expected=expected, verdict=RowVerdict.skipped)


def measure_and_write_rows(path: Path, tasks: Iterable[Task]) -> None:
    """Measure every task; append each row to ``path`` at once, so that a crash loses no row."""
    faulthandler.enable()  # a crash prints the stacks
    with closing(JsonlWriter(path)) as writer:
        extend_deadline()
        for task in tasks:
            writer.write(asdict(measure_row(*task)))
            extend_deadline()


def extend_deadline(seconds: float = 0.0) -> None:
    """Make this process print its stacks and end in ``seconds``, or in MOST_QUIET if that is later.

    A later call replaces the deadline of an earlier one.
    """
    faulthandler.dump_traceback_later(max(MOST_QUIET, seconds), exit=True)


def measure_row(what: str, measure: Callable[[], CheckRow]) -> CheckRow:
    """Return the row of the task named ``what``; if ``measure`` raises, a failed row."""
    began = time.monotonic()
    try:
        row = measure()
    except Exception as error:
        if not isinstance(error, RlhfError):
            traceback.print_exception(error)
        row = CheckRow(figure=reason_of(error), verdict=RowVerdict.failed)
    return replace(row, what=what, seconds=time.monotonic() - began)


@dataclass(kw_only=True)
class CheckPart:
    """A part of the check: its title and description, and the rows that it has measured."""

    name: str
    title: str
    about: str
    module: str
    """The module with the function ``check_NAME``, which yields the tasks."""
    remedies: Mapping[str, str] = field(default_factory=dict)
    """Overrides of launch.py that avoid a failed row, by words in the row's name."""
    rows: list[CheckRow] = field(default_factory=list)
    """The rows measured so far, in their order."""
    seconds: float = 0.0

    @property
    def failed_rows(self) -> list[CheckRow]:
        """Return the rows that failed."""
        return [row for row in self.rows if row.verdict is RowVerdict.failed]

    @property
    def verdict(self) -> RowVerdict | None:
        """Return the first of failed, passed, measured and skipped that a row has, else None."""
        order = (RowVerdict.failed, RowVerdict.passed, RowVerdict.measured, RowVerdict.skipped)
        return min((row.verdict for row in self.rows), key=order.index, default=None)

    def find_remedy(self, row: CheckRow) -> str:
        """Return the overrides that avoid what failed in ``row``, or a text that there are none."""
        texts = (text for words, text in self.remedies.items() if words in row.what)
        return next(texts, f"no override avoids {self.title}, {row.what}")


def read_parts() -> list[CheckPart]:
    """Return the parts of the check, in the order in which they run, without rows."""
    return [
        CheckPart(**{"name": name, "module": name} | part)
        for name, part in read_yaml_beside(__file__, "parts.yaml").items()
    ]


@dataclass(frozen=True, kw_only=True)
class CheckResults:
    """The content of gpu_check.md: start time and command of a check, and its parts."""

    started: str
    command: str
    parts: list[CheckPart]

    @property
    def ended_parts(self) -> list[CheckPart]:
        """Return the parts that have measured rows."""
        return [part for part in self.parts if part.rows]

    @property
    def failed_parts(self) -> list[CheckPart]:
        """Return the parts that failed."""
        return [part for part in self.parts if part.failed_rows]

    @property
    def waiting(self) -> list[str]:
        """Return the names of the parts that have not run yet."""
        return [part.name for part in self.parts if not part.rows]


def write_results(folder: Path, check: CheckResults) -> None:
    """Write gpu_check.json and gpu_check.md to ``folder``; replace each older file atomically."""
    write_json(folder / JSON, results_as_json(check))
    write_text_atomically(folder / PAGE, "\n".join(_page_lines(check)))


def results_as_json(check: CheckResults) -> dict[str, Any]:
    """Return the content of gpu_check.json."""
    return {
        "started": check.started,
        "command": check.command,
        "failed": [part.name for part in check.failed_parts],
        "waiting": check.waiting,
        "parts": [
            {"name": part.name, "verdict": part.verdict, "seconds": part.seconds}
            | {"rows": [asdict(row) for row in part.rows]}
            for part in check.ended_parts
        ],
    }


def _page_lines(check: CheckResults) -> Iterator[str]:
    """Yield the page in pieces: advice, card, failed rows, and a section for each part."""
    yield f"{advice(check)}\n\n# GPU check\n"
    rows = [row for part in check.parts for row in part.rows]
    yield from (f"Card: **{row.figure}**.\n" for row in rows if row.what == CARD)
    minutes = sum(part.seconds for part in check.parts) / 60
    yield f"Started {check.started} with `{check.command}`, {minutes:.1f} minutes so far. "
    yield "docs/operations.md explains the page; `gpu_check.json` has all figures for programs.\n"
    if check.failed_parts:
        yield "## What failed\n"
        for part in check.failed_parts:
            for row in part.failed_rows:
                yield f"- **{part.title}, {row.what}**: {row.text}"
        yield ""
    for part in check.ended_parts:
        counts = Counter(row.verdict for row in part.rows)
        counted = ", ".join(f"{counts[v]} {v}" for v in RowVerdict if counts[v])
        yield f"## {part.title}\n\n{counted}; {part.seconds:.1f} seconds. {part.about}\n"
        cells = [
            (*(r.what, r.figure, r.expected), MARKS.get(r.verdict, r.verdict), f"{r.seconds:.1f}")
            for r in part.rows
        ]
        yield markdown_table(("", "figure", "expected", "verdict", "seconds"), cells) + "\n"


def advice(check: CheckResults) -> str:
    """Return sentences on which parts work on this machine, which fail, and what to set."""
    verdicts_by_words = {
        "Works here": (RowVerdict.passed, RowVerdict.measured),
        "Cannot run here": (RowVerdict.skipped,),
        "Fails": (RowVerdict.failed,),
    }
    titles = {
        words: [part.title for part in check.parts if part.verdict in verdicts]
        for words, verdicts in verdicts_by_words.items()
    } | {"Not run yet": check.waiting}
    lists = "".join(f"{words}: {', '.join(names)}. " for words, names in titles.items() if names)
    remedies = {part.find_remedy(row): None for part in check.parts for row in part.failed_rows}
    return f"{lists}Set: {'; '.join(remedies) or 'nothing'}."
