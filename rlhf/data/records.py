"""The one internal form of an example, whatever layout it came in, and of a data set as read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from rlhf.config.choices import Phase


class Record(NamedTuple):
    """One example; a part that its source does not have is None.

    ``chosen`` is the better response where there are two, and the only one where there is one.
    Prompt and response are joined without a separator: both carry their own white space.
    """

    prompt: str | None = None
    chosen: str | None = None
    rejected: str | None = None
    text: str | None = None


class RawDataset(NamedTuple):
    """One data set as read: its usable records and what became of the rest."""

    name: str
    train: list[Record]
    eval: list[Record] | None
    """Held-out records that the data set brings along; None: it brings none."""
    layout: str
    left_out: Counter[str]
    """Rows that cannot be used, by reason."""
    weight: float = 1.0
    """Times that its training records are taken."""
    phases: Sequence[Phase] | None = None
    """The only phases that it is for; None: all."""
