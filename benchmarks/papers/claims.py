"""What a module of this folder states before it is run: claim, criterion, seeds, and functions.

Criteria are committed before the first run of a result and are not edited after it. A criterion
that was wrong stays, and a second one stands beside it, with the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple

Figures = dict[str, float | list[float] | str]
"""What one seed measured, as JSON keeps it."""


class NotMeasurableError(RuntimeError):
    """A row cannot be measured here; the message says what is missing."""


class Outcome(StrEnum):
    """Whether the criterion holds."""

    PASSED = "passed"
    FAILED = "failed"
    OPEN = "cannot be told"


class Verdict(NamedTuple):
    """The outcome of a criterion, and the figures that decide it, in a sentence."""

    outcome: Outcome
    found: str


class Place(NamedTuple):
    """Where a seed is measured."""

    folder: Path
    """Of this result and seed alone; what has finished there is not run again."""
    shared: Path
    """Of all results: models that several of them start from."""
    is_quick: bool
    """Less of everything, to see the code run: no figures to publish."""


@dataclass(frozen=True, kw_only=True)
class PaperResult:
    """One result of a paper, as a claim that can fail."""

    title: str
    source: str
    """Paper and place in it: an address, and an equation, figure or section."""
    claim: str
    """What the paper says, in one sentence."""
    criterion: str
    """What must be measured here for `passed`, and what for `failed`; the rest cannot be told."""
    seeds: tuple[int, ...] = (1, 2, 3)
    minutes: float
    """CPU time of one seed, about."""
    note: str = ""
    """What a reader must know to read the outcome rightly, added after it; empty: nothing."""
    needs: str = ""
    """What a reader sets up before, beside this program; empty: nothing."""
    measure: Callable[[int, Place], Figures]
    judge: Callable[[Mapping[int, Figures]], Verdict]
    """From the figures of each seed to the verdict."""
