"""Types of an example, which is the same for all column layouts, and of a dataset as read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from rlhf.config.choices import Phase


class Record(NamedTuple):
    """One example; a field that its source does not have is None.

    ``chosen`` is the better of two responses, or the only response. Prompt and response are joined
    without a separator: both contain their own whitespace.
    """

    prompt: str | None = None
    chosen: str | None = None
    rejected: str | None = None
    text: str | None = None
    columns: Mapping[str, Any] | None = None
    """Other columns of its row, which rewards read; None: no reward reads any."""

    @property
    def texts(self) -> tuple[str | None, ...]:
        """Return prompt, chosen, rejected and text, each of which may be None."""
        return (self.prompt, self.chosen, self.rejected, self.text)


class RawDataset(NamedTuple):
    """One dataset as read: its usable records, and counts of the dropped rows."""

    name: str
    train: list[Record]
    eval: list[Record] | None
    """Held-out records that come with the dataset; None: it has none."""
    layout: str
    left_out: Counter[str]
    """Number of dropped rows, by reason."""
    weight: float = 1.0
    """Number of times that its training records are used."""
    phases: Sequence[Phase] | None = None
    """The only phases that use it; None: all phases."""
