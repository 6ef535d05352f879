"""The input of a part of a check, and the rows that it measures, stored as lines of JSON."""

from __future__ import annotations

import json
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple

from rlhf.base.errors import RlhfError
from rlhf.base.finite_numbers import replace_non_finite


class Size(StrEnum):
    """The size of the models to measure; memory and speed of tiny models mean little."""

    full = "full"
    tiny = "tiny"


@dataclass(frozen=True, kw_only=True)
class CheckSetting:
    """The folder of a part, which exists, and the size of its models."""

    folder: Path
    size: Size


class RowVerdict(StrEnum):
    """The verdict of a row about this machine."""

    passed = "passed"
    failed = "failed"
    measured = "measured"
    """A figure without an expectation."""
    skipped = "skipped"
    """This machine or version cannot do it; the figure says why. No failure."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """The result of one task: a figure in words, and its ``numbers`` by name for programs."""

    figure: str
    expected: str = ""
    verdict: RowVerdict
    numbers: Mapping[str, float] = field(default_factory=dict)


class Task(NamedTuple):
    """One thing to measure; an exception in ``measure`` becomes a failed row."""

    what: str
    measure: Callable[[], Finding]


@dataclass(frozen=True, kw_only=True)
class CheckRow(Finding):
    """A finding, with the name of its task and the seconds that the task took."""

    what: str
    seconds: float


def checked_finding(is_right: bool, figure: str, expected: str, **numbers: float) -> Finding:
    """Return a finding that passed or failed."""
    verdict = RowVerdict.passed if is_right else RowVerdict.failed
    return Finding(figure=figure, expected=expected, verdict=verdict, numbers=numbers)


def measured_finding(figure: str, **numbers: float) -> Finding:
    """Return a figure without an expectation."""
    return Finding(figure=figure, verdict=RowVerdict.measured, numbers=numbers)


def skipped_finding(figure: str, expected: str = "") -> Finding:
    """Return a finding about what this machine or version cannot do; ``figure`` is the reason."""
    return Finding(figure=figure, expected=expected, verdict=RowVerdict.skipped)


def first_line_of(error: Exception) -> str:
    """Return the type of ``error`` and the first line of its message."""
    first = (str(error).strip() or "no message").partition("\n")[0]
    return f"{type(error).__name__}: {first}"


def write_rows(path: Path, tasks: Iterable[Task]) -> None:
    """Measure every task; append each row to ``path`` at once, so that a crash loses no row."""
    for task in tasks:
        row = measure_row(task)
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(replace_non_finite(asdict(row))) + "\n")


def measure_row(task: Task) -> CheckRow:
    """Measure ``task``; return its row, which is a failed row if ``task.measure`` raises."""
    began = time.monotonic()
    try:
        finding = task.measure()
    except Exception as error:
        if not isinstance(error, RlhfError):
            traceback.print_exception(error)
        finding = Finding(figure=first_line_of(error), verdict=RowVerdict.failed)
    return CheckRow(what=task.what, seconds=time.monotonic() - began, **vars(finding))


def read_check_rows(path: Path) -> list[CheckRow]:
    """Return the rows that ``write_rows`` has written so far."""
    if not path.exists():
        return []
    # The last line has no newline while it is being written, or if its process was killed then.
    lines = [line for line in path.read_text(encoding="utf-8").splitlines(True) if line[-1] == "\n"]
    rows = map(json.loads, lines)
    return [CheckRow(**row | {"verdict": RowVerdict(row["verdict"])}) for row in rows]
