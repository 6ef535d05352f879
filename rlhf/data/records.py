"""Types of an example, which is the same for all column layouts, and of a dataset as read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from rlhf.config.choices import Phase


class Exchange(NamedTuple):
    """A response in an episode, and the observation that followed it."""

    response: str
    observation: str | None
    """None: the episode ended."""
    role: str = "user"


class RecordedEpisode(NamedTuple):
    """An episode of an environment, whose first observation is a record's prompt."""

    seed: int
    turns: tuple[Exchange, ...] = ()
    """A demonstration."""


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
    episode: RecordedEpisode | None = None
    """The episode that begins with the prompt; None: no environment."""

    @property
    def texts(self) -> tuple[str | None, ...]:
        """Return prompt, chosen, rejected and text, each of which may be None."""
        return (self.prompt, self.chosen, self.rejected, self.text)

    @property
    def spoken(self) -> tuple[str | None, ...]:
        """Return the texts, and those of the turns of an episode."""
        turns = self.episode.turns if self.episode else ()
        return self.texts + tuple(
            text for turn in turns for text in (turn.response, turn.observation)
        )


def episode_seeds(records: Sequence[Record]) -> list[int] | None:
    """Return the seeds of the records' episodes; None without an environment."""
    seeds = [record.episode.seed for record in records if record.episode is not None]
    return seeds or None


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
