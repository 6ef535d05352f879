"""Adapter of reasoning_gym's generators: a question, and one turn for the answer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlhf.config.choices import EnvironmentKind
from rlhf.environments.interface import Step
from rlhf.environments.third_party import import_package, refuse_id


class ReasoningQuestion:
    """An environment of one turn; the reward is the score of the answer, from 0 to 1.

    ``optimum`` is 1 if the generator gives its own answer the score 1, and otherwise None.
    """

    def __init__(self, id: str, **options: Any) -> None:
        """Prepare a generator.

        Raises:
            ConfigError: if there is no such generator, or its options are wrong.
        """
        self._package = import_package(EnvironmentKind.reasoning_gym, "reasoning_gym")
        self._id, self._options = id, options
        with refuse_id(id):
            self._ask(0)
            is_right = self._score(self.demonstration()) == 1
        self.optimum = 1.0 if is_right else None

    def reset(self, *, seed: int, row: Mapping[str, Any]) -> str:  # noqa: ARG002 - needs no data
        """Return the question of this seed."""
        self._ask(seed % 2**31)
        return str(self._entry["question"])

    def step(self, text: str) -> Step:
        """Score the answer."""
        try:
            score = self._score(text.strip())
        except (
            Exception
        ):  # scorers read answers with int() or json.loads, and raise what they raise
            info = {"success": False, "malformed": True}
            return Step("", terminated=True, info=info)
        return Step("", reward=score, terminated=True, info={"success": score >= 1})

    def demonstration(self) -> str:
        """Return the generator's own answer, which is empty if it has none."""
        return str(self._entry["answer"] or "")

    def _ask(self, seed: int) -> None:
        # Some generators build all their rows at once, so that there is one.
        self._data = self._package.create_dataset(self._id, seed=seed, size=1, **self._options)
        self._entry = self._data[0]

    def _score(self, answer: str) -> float:
        return float(self._data.score_answer(answer, self._entry))
