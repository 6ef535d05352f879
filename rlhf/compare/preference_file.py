"""The files that store choices, each choice as soon as it is made.

FILE.jsonl has one preference per line, which ``data=local`` reads. Ties and pairs of two bad
answers are no preferences: they go to FILE.undecided.jsonl.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import Any, NamedTuple

from rlhf.base.errors import ConfigError
from rlhf.base.intervals import wilson_interval
from rlhf.base.stored_files import DamagedFileError, read_bytes, read_lines
from rlhf.compare.answer_pairs import Answer, AnswerPair
from rlhf.tracking.jsonl import JsonlWriter


class Verdict(StrEnum):
    """A judgement of two answers."""

    a = "a"
    b = "b"
    tie = "tie"
    both_bad = "both_bad"


class Judged(NamedTuple):
    """A judged pair; ``winner`` is None for a tie and for two bad answers."""

    prompt: str
    answers: frozenset[Answer]
    winner: str | None


class PreferenceFile:
    """The choices of one person, in a file of preferences and a file of undecided choices.

    Raises:
        ConfigError: if a file ends within a line.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._undecided = path.with_suffix(".undecided.jsonl")
        for each in (path, self._undecided):
            if (content := read_bytes(each)) and not content.endswith(b"\n"):
                raise ConfigError(
                    f"{each} ends within a line: complete or remove its last line, or choose "
                    "another file with --out FILE"
                )
        self._writers: dict[Path, JsonlWriter] = {}
        is_new = not path.exists()
        self._open_writer(path)  # a path that cannot be written is refused before the first choice
        self.close()
        if is_new:
            path.unlink()

    def read_choices(self) -> Iterator[Judged]:
        """Yield all choices so far; rows without names of models are skipped."""
        for prompt, chosen, rejected in _read_rows(self.path, "chosen", "rejected"):
            yield Judged(prompt, frozenset((chosen, rejected)), chosen.model)
        for prompt, first, second in _read_rows(self._undecided, "a", "b"):
            yield Judged(prompt, frozenset((first, second)), None)

    def add(self, pair: AnswerPair, verdict: Verdict) -> None:
        """Append a choice.

        Raises:
            ConfigError: if the file cannot be opened.
            CheckpointError: if the drive is full, or cannot be written.
        """
        if verdict in {Verdict.a, Verdict.b}:
            chosen, rejected = (pair.a, pair.b) if verdict is Verdict.a else (pair.b, pair.a)
            row = {"prompt": pair.prompt, "chosen": chosen.text, "rejected": rejected.text}
            row |= {"chosen_by": chosen.model, "rejected_by": rejected.model}
            self._open_writer(self.path).write(row | {"shown_first": pair.a.model})
        else:
            row = {"prompt": pair.prompt, "a": pair.a.text, "b": pair.b.text}
            row |= {"a_by": pair.a.model, "b_by": pair.b.model, "verdict": verdict.value}
            self._open_writer(self._undecided).write(row)

    def close(self) -> None:
        """Close the files."""
        while self._writers:
            self._writers.popitem()[1].close()

    def _open_writer(self, path: Path) -> JsonlWriter:
        if path not in self._writers:
            try:
                self._writers[path] = JsonlWriter(path)
            except (OSError, DamagedFileError) as error:
                if path.is_symlink():
                    raise
                reason = getattr(error.__cause__ or error, "strerror", "not a regular file")
                raise ConfigError(
                    f"{path} cannot be written ({reason}): choose another file with --out FILE"
                ) from error
        return self._writers[path]


def _read_rows(path: Path, first: str, second: str) -> Iterator[tuple[str, Answer, Answer]]:
    """Yield prompts with the answers in two columns; skip rows that do not name both models."""
    columns = ("prompt", f"{first}_by", first, f"{second}_by", second)
    for row in read_lines(path, object):
        texts: list[Any] = [row.get(c) for c in columns] if isinstance(row, dict) else [None]
        if all(isinstance(text, str) for text in texts):
            prompt, first_by, first_text, second_by, second_text = texts
            yield prompt, Answer(first_by, first_text), Answer(second_by, second_text)


class WinRate(NamedTuple):
    """Counts of choices between two models: wins of the first, wins of the second, undecided."""

    models: tuple[str, str]
    wins: int
    losses: int
    undecided: int

    @classmethod
    def from_choices(cls, models: tuple[str, str], judged: list[Judged]) -> WinRate:
        """Return the counts of the choices in ``judged`` that are between these two models."""
        ours = [j.winner for j in judged if {answer.model for answer in j.answers} == set(models)]
        wins, losses = (ours.count(model) for model in models)
        return cls(models, wins, losses, len(ours) - wins - losses)

    @property
    def size(self) -> int:
        """Return the number of choices."""
        return self.wins + self.losses + self.undecided

    def __str__(self) -> str:
        first, second = self.models
        if not self.size:
            return f"No choice yet between {first} and {second}."
        won = self.wins + self.undecided / 2
        low, high = wilson_interval(won, self.size)
        return (
            f"{first} was preferred to {second} in {won / self.size:.0%} of {self.size} "
            f"comparisons (95 % interval {low:.0%} to {high:.0%}): {self.wins} better, "
            f"{self.losses} worse, {self.undecided} undecided, which count half."
        )
