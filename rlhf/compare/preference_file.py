"""Pair the answers of two models to the same prompts, and store each choice as soon as it is made.

FILE.jsonl has one preference per line, which ``data=local`` reads. Ties and pairs of two bad
answers are no preferences: they go to FILE.undecided.jsonl.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any, NamedTuple

from rlhf.base.errors import CheckpointError, ConfigError, DataError
from rlhf.base.intervals import wilson_interval
from rlhf.base.stored_files import SAMPLES, DamagedFileError, read_bytes, read_json_lines
from rlhf.config.freeze import read_frozen_keys
from rlhf.data.records import Row
from rlhf.data.tables import read_table_rows
from rlhf.run.jsonl import JsonlWriter

TWO = 2


class Answer(NamedTuple):
    """A response and the model that gave it."""

    model: str
    text: str


class AnswerPair(NamedTuple):
    """Two answers to a prompt; the page shows ``a`` on the left."""

    prompt: str
    a: Answer
    b: Answer

    @property
    def prompt_and_answers(self) -> tuple[str, frozenset[Answer]]:
        """Return the prompt and the set of the answers, which is equal for both orders."""
        return self.prompt, frozenset((self.a, self.b))


class AnsweringModel(NamedTuple):
    """A model to compare: its name and its answers by prompt."""

    name: str
    answers: Mapping[str, str]


def read_models_of_runs(
    run_dir: Path, against: Path | None
) -> tuple[AnsweringModel, AnsweringModel]:
    """Return the run's policy after PPO, and its SFT model or the policy of the run ``against``.

    Raises:
        CheckpointError: if a folder is no run, or its samples.jsonl lacks the answers.
        ConfigError: if ``against`` is the same run.
    """
    trained = _read_actor_answers(run_dir, is_trained=True)
    other = _read_actor_answers(against or run_dir, is_trained=against is not None)
    if trained.name == other.name:
        raise ConfigError(f"--against {against}: must be a different run from {run_dir}")
    return trained, other


def read_models_of_file(path: Path, names: Sequence[str]) -> tuple[AnsweringModel, AnsweringModel]:
    """Return two models with their answers in a file: those in ``names``, or the file's only two.

    Each row has prompt, response and model. Of a model's answers to a prompt, the first is used.

    Raises:
        DataError: if the file cannot be read, or a row lacks a text.
        ConfigError: if ``names`` are not two models of the file, or are missing and it has not two.
    """
    answers: dict[str, dict[str, str]] = {}
    for row in read_table_rows(path):
        prompt, response, model = (_require_text(row, c) for c in ("prompt", "response", "model"))
        answers.setdefault(model, {}).setdefault(prompt, response)
    chosen = list(dict.fromkeys(names or answers))
    if len(chosen) != TWO or not set(chosen) <= answers.keys():
        raise ConfigError(
            f"{path} has answers from {', '.join(answers)}: name two of these models, --models "
            "FIRST SECOND"
        )
    first, second = (AnsweringModel(name, answers[name]) for name in chosen)
    return first, second


def make_pairs(first: AnsweringModel, second: AnsweringModel, *, seed: int) -> list[AnswerPair]:
    """Pair the models' different answers to equal prompts; ``seed`` decides which is on the left.

    Spaces at the ends of answers, which no page shows, make no difference.

    Raises:
        DataError: if no prompt has two different answers.
    """
    pairs = []
    for prompt, answer in first.answers.items():
        if answer.strip() != second.answers.get(prompt, answer).strip():
            shown = [Answer(model.name, model.answers[prompt]) for model in (first, second)]
            # The prompt is part of the seed, so that a reopened page shows the same order.
            random.Random(f"{seed}/{prompt}").shuffle(shown)
            pairs.append(AnswerPair(prompt, *shown))
    if not pairs:
        raise DataError(
            f"{first.name} and {second.name} share no prompt that they answered differently: "
            "compare runs with the same data and seed, or models that differ more"
        )
    return pairs


def _read_actor_answers(run_dir: Path, *, is_trained: bool) -> AnsweringModel:
    """Return the actor's answers after PPO if ``is_trained``, otherwise its answers before PPO."""
    read_frozen_keys(run_dir)  # raises an error if this is no run
    by_step: dict[int, dict[str, str]] = {}
    for row in SAMPLES.read_lines(run_dir):
        if row["phase"] == "ppo" and row.get("model", "actor") == "actor":
            by_step.setdefault(row["step"], {})[row["prompt"]] = row["response"]
    step = max(by_step, default=0) if is_trained else 0
    if step not in by_step or (is_trained and not step):
        when = "after a step of PPO" if is_trained else "before PPO"
        raise CheckpointError(
            f"{run_dir}/samples.jsonl has no answers {when}. PPO writes them at its first and "
            "last step; compare a run that has finished PPO, or a file of answers: --answers FILE"
        )
    name = "/".join(run_dir.resolve().parts[-TWO:])
    stage = f"PPO step {step}" if is_trained else "SFT"
    return AnsweringModel(f"{name}, {stage}", by_step[step])


def _require_text(row: Row, column: str) -> str:
    value = row.values.get(column)
    if not isinstance(value, str):
        raise row.build_error(
            f"column '{column}' holds a value of type {type(value).__name__}; must be text. "
            "A row of answers has prompt, response and model"
        )
    return value


Verdict = StrEnum("Verdict", "a b tie both_bad")
"""A person's judgement of two answers."""


class PreferenceFile:
    """The choices of one person, in a file of preferences and a file of undecided choices.

    Raises:
        ConfigError: if the last line of a file is incomplete, or ``path`` cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._undecided = path.with_suffix(".undecided.jsonl")
        for file in (path, self._undecided):
            if (content := read_bytes(file)) and not content.endswith(b"\n"):
                raise ConfigError(
                    f"{file} ends in the middle of a line: complete or remove its last line, or "
                    "choose another file with --out FILE"
                )
        self._writers: dict[Path, JsonlWriter] = {}
        is_new = not path.exists()
        self._open_writer(path)  # a path that cannot be written is refused before the first choice
        self.close()
        if is_new:
            path.unlink()

    def read_choices(self) -> Iterator[tuple[AnswerPair, str | None]]:
        """Yield all pairs judged so far, each with the model that won, or None if undecided.

        Rows without the names of the models are skipped.
        """
        for pair in _read_answer_pairs(self.path, "chosen", "rejected"):
            yield pair, pair.a.model
        for pair in _read_answer_pairs(self._undecided, "a", "b"):
            yield pair, None

    def add_choice(self, pair: AnswerPair, verdict: Verdict) -> None:
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


def _read_answer_pairs(path: Path, first: str, second: str) -> Iterator[AnswerPair]:
    """Yield the pairs of a file whose answers are in two columns; skip rows without models."""
    columns = ("prompt", f"{first}_by", first, f"{second}_by", second)
    for row in read_json_lines(path, object):
        cells: list[Any] = [row.get(c) for c in columns] if isinstance(row, dict) else [None]
        if all(isinstance(cell, str) for cell in cells):
            prompt, first_by, first_text, second_by, second_text = cells
            yield AnswerPair(prompt, Answer(first_by, first_text), Answer(second_by, second_text))


class WinRate(NamedTuple):
    """Counts of choices between two models: wins of the first, wins of the second, undecided."""

    models: tuple[str, str]
    wins: int
    losses: int
    undecided: int

    @classmethod
    def from_choices(
        cls, models: tuple[str, str], judged: Iterable[tuple[AnswerPair, str | None]]
    ) -> WinRate:
        """Count the choices in ``judged`` between these two models."""
        winners = [winner for pair, winner in judged if {pair.a.model, pair.b.model} == set(models)]
        wins, losses = (winners.count(model) for model in models)
        return cls(models, wins, losses, len(winners) - wins - losses)

    @property
    def rate(self) -> tuple[float, tuple[float, float]] | None:
        """Return the first model's win rate and its 95 % interval; undecided choices count half."""
        won, total = self.wins + self.undecided / 2, self.wins + self.losses + self.undecided
        return (won / total, wilson_interval(won, total)) if total else None

    def as_json(self) -> dict[str, Any]:
        """Return the counts, and the win rate and its interval, which are None without choices."""
        rate, interval = self.rate or (None, None)
        return {**self._asdict(), "win_rate": rate, "win_rate_ci": interval}

    def __str__(self) -> str:
        first, second = self.models
        if self.rate is None:
            return f"No choice yet between {first} and {second}."
        rate, (low, high) = self.rate
        return (
            f"{first} was preferred to {second} in {rate:.0%} of "
            f"{self.wins + self.losses + self.undecided} comparisons (95 % interval {low:.0%} to "
            f"{high:.0%}): {self.wins} better, {self.losses} worse, {self.undecided} undecided, "
            "which count half."
        )
