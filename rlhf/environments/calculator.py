"""Questions of arithmetic, and a tool that answers them: "calc 47+385" returns "432"."""

from __future__ import annotations

import re
from collections.abc import Mapping
from math import prod
from random import Random
from typing import Any

from rlhf.base.errors import ConfigError
from rlhf.environments.interface import Observation, Step

EXPRESSION = re.compile(r"\d{1,9}([-+*]\d{1,9}){0,7}", re.ASCII)  # no number that takes long
CALL = "calc"
EXPERT_FORGETS = 0.4  # part of the episodes in which the expert does not call the tool


class Calculator:
    """An environment in which a policy gains by calling the tool before it answers.

    ``tool=False`` answers every call with "no tool".
    """

    optimum = 1.0  # the value of the expression is the right answer

    def __init__(
        self, tool: bool = True, largest: int = 999, terms: int = 2, operations: str = "+-*"
    ) -> None:
        """Set the largest number in a question, how many numbers it has, and its operations."""
        if not 1 <= largest < 10**9:
            raise ConfigError(f"environment.options.largest={largest}: must be from 1 to 999999999")
        if terms not in range(2, 9):
            raise ConfigError(f"environment.options.terms={terms}: must be from 2 to 8")
        if not operations or set(operations) - set("+-*"):
            raise ConfigError(
                f"environment.options.operations={operations}: must be some of the signs +-*"
            )
        self._tool, self._largest, self._terms = tool, largest, terms
        self._operations = operations

    def reset(self, *, seed: int, row: Mapping[str, Any]) -> str:  # noqa: ARG002 - needs no data
        """Return a question such as "47+385=?"."""
        rng = Random(seed)
        self._question = str(rng.randint(1, self._largest))
        for _ in range(self._terms - 1):
            self._question += rng.choice(self._operations) + str(rng.randint(1, self._largest))
        self._answer = evaluate_arithmetic(self._question)
        self._told: str | None = None  # what the tool returned last
        self._expert = Random(f"expert {seed}")  # its choices do not change the episode
        self._forgets = self._expert.random() < EXPERT_FORGETS
        return f"{self._question}=?"

    def step(self, text: str) -> Step:
        """Answer a call of the tool; any other text is the answer and ends the episode."""
        word, _, rest = text.strip().partition(" ")
        if word == CALL:
            return self._call(rest.replace(" ", ""))
        answer = text.strip()
        is_number = re.fullmatch(r"-?\d{1,100}", answer, re.ASCII) is not None
        is_right = is_number and int(answer) == self._answer
        info = {"success": is_right, "malformed": not is_number}
        return Step("", reward=float(is_right), terminated=True, info=info)

    def _call(self, expression: str) -> Step:
        if not self._tool:
            return Step(Observation("no tool", role="tool"), info={"success": False})
        if not EXPRESSION.fullmatch(expression):
            info = {"success": False, "malformed": True}
            return Step(Observation("error", role="tool"), info=info)
        self._told = str(evaluate_arithmetic(expression))
        return Step(Observation(self._told, role="tool"), info={"success": False})

    def demonstration(self) -> str:
        """Call the tool and repeat what it returns, or forget it and guess the last digit."""
        if self._told is not None:
            return self._told
        if self._tool and not self._forgets:
            return f"{CALL} {self._question}"
        return str(self._answer - self._answer % 10 + self._expert.randrange(10))

    def random_turn(self, rng: Random) -> str:
        """Return a number that could be an answer, without calling the tool."""
        return str(rng.randint(1, 2 * self._largest))


def evaluate_arithmetic(expression: str) -> int:
    """Return the value of an expression that matches ``EXPRESSION``; * binds more than + and -."""
    products = re.findall(r"([-+]?)(\d+(?:\*\d+)*)", expression)
    return sum(
        (-1 if sign == "-" else 1) * prod(map(int, factors.split("*")))
        for sign, factors in products
    )
