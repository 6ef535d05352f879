"""Pair the answers of two models to the same prompts, in random order."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from rlhf.base.errors import CheckpointError, ConfigError, DataError
from rlhf.base.stored_files import SAMPLE, read_lines
from rlhf.config.freeze import frozen_keys
from rlhf.data.records import Row
from rlhf.data.tables import read_table_rows

TWO = 2


class Answer(NamedTuple):
    """A response and the model that gave it."""

    model: str
    text: str


class AnswerPair(NamedTuple):
    """Two answers to a prompt, as they are shown: ``a`` is on the left."""

    prompt: str
    a: Answer
    b: Answer

    @property
    def key(self) -> tuple[str, frozenset[Answer]]:
        """Return the prompt and the set of answers: equal for both orders of the answers."""
        return self.prompt, frozenset((self.a, self.b))


class AnsweringModel(NamedTuple):
    """A model's name and its answers by prompt."""

    name: str
    answers: Mapping[str, str]


def read_models_of_runs(
    run_dir: Path, against: Path | None
) -> tuple[AnsweringModel, AnsweringModel]:
    """Return the policy after PPO, and the SFT model or the policy of the run ``against``.

    Raises:
        CheckpointError: if a folder is no run, or its samples.jsonl lacks the answers.
        ConfigError: if both are the same run.
    """
    if against is None:
        return _model_after_ppo(run_dir), _model_before_ppo(run_dir)
    models = _model_after_ppo(run_dir), _model_after_ppo(against)
    if models[0].name == models[1].name:
        raise ConfigError(f"--against {against}: must be another run than {run_dir}")
    return models


def read_models_of_file(path: Path, names: Sequence[str]) -> tuple[AnsweringModel, AnsweringModel]:
    """Return the two models called ``names`` in a file of answers; without names, its only two.

    Each row has prompt, response and model. Of several answers to a prompt the first counts.

    Raises:
        DataError: if the file cannot be read, or a row lacks a text.
        ConfigError: if the file lacks a named model, or has not exactly two and none is named.
    """
    answers: dict[str, dict[str, str]] = {}
    for row in read_table_rows(path):
        prompt, response, model = (_require_text(row, c) for c in ("prompt", "response", "model"))
        answers.setdefault(model, {}).setdefault(prompt, response)
    if (
        len(chosen := list(dict.fromkeys(names or answers))) != TWO
        or not set(chosen) <= answers.keys()
    ):
        raise ConfigError(
            f"{path} has answers of {', '.join(answers)}: name two of these models, "
            "--models FIRST SECOND"
        )
    first, second = (AnsweringModel(name, answers[name]) for name in chosen)
    return first, second


def make_pairs(first: AnsweringModel, second: AnsweringModel, *, seed: int) -> list[AnswerPair]:
    """Return pairs of different answers to the same prompts; ``seed`` decides who is on the left.

    Raises:
        DataError: if no prompt has two different answers.
    """
    pairs = []
    for prompt in first.answers:
        if prompt in second.answers and first.answers[prompt] != second.answers[prompt]:
            shown = [Answer(model.name, model.answers[prompt]) for model in (first, second)]
            # Seeded by the prompt, so that a page that is opened again shows the same order.
            random.Random(f"{seed}/{prompt}").shuffle(shown)
            pairs.append(AnswerPair(prompt, *shown))
    if not pairs:
        raise DataError(
            f"{first.name} and {second.name} have no prompt in common with different answers: "
            "compare runs with the same data and seed, or models that differ more"
        )
    return pairs


def _model_before_ppo(run_dir: Path) -> AnsweringModel:
    by_step = _answers_by_step(run_dir)
    if 0 not in by_step:
        raise _no_answers_error(run_dir, "before PPO")
    return AnsweringModel(f"{_display_name(run_dir)}, SFT", by_step[0])


def _model_after_ppo(run_dir: Path) -> AnsweringModel:
    by_step = _answers_by_step(run_dir)
    if (last := max(by_step, default=0)) == 0:
        raise _no_answers_error(run_dir, "after a step of PPO")
    return AnsweringModel(f"{_display_name(run_dir)}, PPO step {last}", by_step[last])


def _answers_by_step(run_dir: Path) -> dict[int, dict[str, str]]:
    """Return the actor's answers by step and prompt."""
    frozen_keys(run_dir)  # raises if this is no run
    found: dict[int, dict[str, str]] = {}
    for row in read_lines(run_dir / "samples.jsonl", SAMPLE):
        if row["phase"] == "ppo" and row.get("model", "actor") == "actor":
            found.setdefault(row["step"], {})[row["prompt"]] = row["response"]
    return found


def _display_name(run_dir: Path) -> str:
    return "/".join(run_dir.resolve().parts[-TWO:])


def _no_answers_error(run_dir: Path, when: str) -> CheckpointError:
    return CheckpointError(
        f"{run_dir}/samples.jsonl has no answers from {when}. PPO writes them at its first and "
        "last step; compare a run that has finished PPO, or a file of answers: --answers FILE"
    )


def _require_text(row: Row, column: str) -> str:
    value = row.values.get(column)
    if not isinstance(value, str):
        raise row.error(
            f"column '{column}' holds a value of type {type(value).__name__}; must be text. "
            "A row of answers has prompt, response and model"
        )
    return value
