"""Guess a hidden number from the answers "higher" and "lower"."""

from __future__ import annotations

import re
from collections.abc import Mapping
from random import Random
from typing import Any

from rlhf.base.errors import ConfigError
from rlhf.environments.interface import Step

LONGEST_GUESS = 9  # digits


class NumberGuessing:
    """An environment in which bisection finds the number, so that the largest return is known."""

    def __init__(self, low: int = 1, high: int = 10, guesses: int = 4) -> None:
        """Set the bounds of the number, both included, and the number of guesses."""
        if high < low:
            raise ConfigError(f"environment.options.high={high}: must be low={low} or more")
        if guesses < 1:
            raise ConfigError(f"environment.options.guesses={guesses}: must be 1 or more")
        self._low, self._high, self._guesses = low, high, guesses
        # g guesses tell 2^g - 1 numbers apart: the middle one, and those of both halves.
        self.optimum = min(1.0, (2**guesses - 1) / (high - low + 1))

    def reset(self, *, seed: int, row: Mapping[str, Any]) -> str:  # noqa: ARG002 - needs no data
        """Hide a number; return the bounds."""
        self._number = Random(seed).randint(self._low, self._high)
        self._expert = Random(f"expert {seed}")  # its choices do not change the episode
        self._known = (self._low, self._high)
        self._left = self._guesses
        return f"guess {self._low} to {self._high}"

    def step(self, text: str) -> Step:
        """Compare a guess with the number; the episode ends when it is right or the last one."""
        self._left -= 1
        answer = text.strip()  # also of control characters, which int does not read
        if not re.fullmatch(rf"-?\d{{1,{LONGEST_GUESS}}}", answer, re.ASCII):
            info = {"malformed": True, "success": False}
            return Step("not a number", terminated=self._left == 0, info=info)
        guess = int(answer)
        if guess == self._number:
            return Step("right", reward=1.0, terminated=True, info={"success": True})
        low, high = self._known
        if guess < self._number:
            self._known = (max(low, guess + 1), high)
        else:
            self._known = (low, min(high, guess - 1))
        hint = "higher" if guess < self._number else "lower"
        return Step(hint, terminated=self._left == 0, info={"success": False})

    def demonstration(self) -> str:
        """Guess at random what the answers so far allow: right form, poor strategy."""
        return str(self._expert.randint(*self._known))

    def random_turn(self, rng: Random) -> str:
        """Return any number within the bounds."""
        return str(rng.randint(self._low, self._high))
