"""Environments that come with this program: blackjack, a calculator, and a number to guess."""

from __future__ import annotations

import re
from collections.abc import Mapping
from math import prod
from random import Random
from typing import Any

from rlhf.base.errors import ConfigError
from rlhf.options.environments.interface import Observation, Step

CARDS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 10, 10, 10)  # values of cards, equally likely; 1 is an ace
BUST, DEALER_STANDS, EXPERT_STICKS = 21, 17, 17  # points: bust above 21, stand or stick from 17
EXPERT_ERRS = 0.3  # share of the turns of blackjack's expert that are random
TURNS = ("hit", "stick")
EXPRESSION = re.compile(r"\d{1,9}([-+*]\d{1,9}){0,7}", re.ASCII)  # up to 8 numbers of 9 digits
CALL = "calc"
EXPERT_FORGETS = 0.4  # share of episodes in which the calculator's expert does not call the tool
LONGEST_GUESS = 9  # maximum number of digits


class Blackjack:
    """A hand of blackjack; the reward is 1 for a win, 0 for a draw and -1 for a loss.

    The rules are those of gymnasium's Blackjack-v1 with its default options: the deck is infinite,
    the dealer stands on every 17, a natural wins no extra, and the player can only hit or stick.
    Source: Sutton and Barto, Reinforcement Learning, 2nd edition, example 5.1.
    """

    optimum = -0.046556  # mean return of perfect play; test_blackjack.py computes it

    def reset(self, *, seed: int, row: Mapping[str, Any]) -> str:  # noqa: ARG002 - needs no data
        """Deal two cards to the dealer, of which one is shown, and two to the player."""
        self._deck = Random(seed)
        self._expert = Random(f"expert {seed}")  # separate from the deck's random generator
        self._dealer = [self._draw_card(), self._draw_card()]
        self._player = [self._draw_card(), self._draw_card()]
        return self._describe_hand()

    def step(self, text: str) -> Step:
        """Hit or stick; any other text loses the hand.

        If other texts had no effect, a policy could repeat such a text until the episode is cut,
        with return 0, which is more than perfect play wins.
        """
        turn = text.strip().lower()
        if turn == "hit":
            self._player.append(self._draw_card())
            if hand_value(self._player)[0] <= BUST:
                return Step(self._describe_hand(), info={"success": False})
            return self._end_hand(-1.0)
        if turn == "stick":
            while hand_value(self._dealer)[0] < DEALER_STANDS:
                self._dealer.append(self._draw_card())
            player, dealer = hand_value(self._player)[0], hand_value(self._dealer)[0]
            if dealer > BUST:
                return self._end_hand(1.0)
            return self._end_hand(float(player > dealer) - float(player < dealer))
        return self._end_hand(-1.0, malformed=True)

    def demonstration(self) -> str:
        """Return the expert's turn: stick at 17 or more, otherwise hit; some turns are random."""
        if self._expert.random() < EXPERT_ERRS:
            return self._expert.choice(TURNS)
        return "stick" if hand_value(self._player)[0] >= EXPERT_STICKS else "hit"

    def random_turn(self, rng: Random) -> str:
        """Return hit or stick at random."""
        return rng.choice(TURNS)

    def _draw_card(self) -> int:
        return self._deck.choice(CARDS)

    def _describe_hand(self) -> str:
        value, is_soft = hand_value(self._player)
        return f"you {'soft ' if is_soft else ''}{value} dealer {self._dealer[0]}"

    def _end_hand(self, reward: float, *, malformed: bool = False) -> Step:
        info = {"success": reward > 0, "malformed": malformed}
        return Step("", reward=reward, terminated=True, info=info)


def hand_value(cards: list[int]) -> tuple[int, bool]:
    """Return the value of a hand, and True if an ace in it counts 11 instead of 1."""
    value = sum(cards)
    is_soft = 1 in cards and value + 10 <= BUST
    return (value + 10 if is_soft else value), is_soft


class Calculator:
    """Questions of arithmetic, and a tool that answers them: "calc 47+385" returns "432".

    A policy gains by calling the tool before it answers. ``tool=False`` answers every call with
    "no tool".
    """

    optimum = 1.0  # the reward for the right answer, which ends the episode

    def __init__(
        self, tool: bool = True, largest: int = 999, terms: int = 2, operations: str = "+-*"
    ) -> None:
        """Set the largest number in a question, the number of terms, and the operations."""
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
        self._told: str | None = None  # the tool's last result
        self._expert = Random(f"expert {seed}")  # separate from the questions' random generator
        self._forgets = self._expert.random() < EXPERT_FORGETS
        return f"{self._question}=?"

    def step(self, text: str) -> Step:
        """Call the tool if the turn begins with "calc"; else score the turn and end the episode."""
        word, _, rest = text.strip().partition(" ")
        if word == CALL:
            return self._call_tool(rest.replace(" ", ""))
        answer = text.strip()
        is_number = re.fullmatch(r"-?\d{1,100}", answer, re.ASCII) is not None
        is_right = is_number and int(answer) == self._answer
        info = {"success": is_right, "malformed": not is_number}
        return Step("", reward=float(is_right), terminated=True, info=info)

    def _call_tool(self, expression: str) -> Step:
        if not self._tool:
            return Step(Observation("no tool", role="tool"), info={"success": False})
        if not EXPRESSION.fullmatch(expression):
            info = {"success": False, "malformed": True}
            return Step(Observation("error", role="tool"), info=info)
        self._told = str(evaluate_arithmetic(expression))
        return Step(Observation(self._told, role="tool"), info={"success": False})

    def demonstration(self) -> str:
        """Return the expert's turn: a call, its result, or a guess with a random last digit."""
        if self._told is not None:
            return self._told
        if self._tool and not self._forgets:
            return f"{CALL} {self._question}"
        return str(self._answer - self._answer % 10 + self._expert.randrange(10))

    def random_turn(self, rng: Random) -> str:
        """Return a number that could be an answer, without calling the tool."""
        return str(rng.randint(1, 2 * self._largest))


def evaluate_arithmetic(expression: str) -> int:
    """Return the value of an expression that matches ``EXPRESSION``; * comes before + and -."""
    products = re.findall(r"([-+]?)(\d+(?:\*\d+)*)", expression)
    return sum(
        (-1 if sign == "-" else 1) * prod(map(int, factors.split("*")))
        for sign, factors in products
    )


class NumberGuessing:
    """A hidden number to guess from the answers "higher" and "lower".

    Bisection is the best strategy, so the largest expected return is known.
    """

    def __init__(self, low: int = 1, high: int = 10, guesses: int = 4) -> None:
        """Set the bounds of the number, both included, and the number of guesses."""
        if high < low:
            raise ConfigError(f"environment.options.high={high}: must be low={low} or more")
        if guesses < 1:
            raise ConfigError(f"environment.options.guesses={guesses}: must be 1 or more")
        self._low, self._high, self._guesses = low, high, guesses
        # g guesses find any of 2^g - 1 numbers, as each guess halves the numbers that are left.
        self.optimum = min(1.0, (2**guesses - 1) / (high - low + 1))

    def reset(self, *, seed: int, row: Mapping[str, Any]) -> str:  # noqa: ARG002 - needs no data
        """Choose the hidden number; return its bounds."""
        self._number = Random(seed).randint(self._low, self._high)
        self._expert = Random(f"expert {seed}")  # separate from the hidden number's generator
        self._known = (self._low, self._high)
        self._left = self._guesses
        return f"guess {self._low} to {self._high}"

    def step(self, text: str) -> Step:
        """Compare a guess with the number; the episode ends at a right guess or the last guess."""
        self._left -= 1
        answer = text.strip()  # strip() also removes control characters, which int() refuses
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
        """Return the expert's turn: a random guess among the numbers that are still possible."""
        return str(self._expert.randint(*self._known))

    def random_turn(self, rng: Random) -> str:
        """Return a random number within the bounds."""
        return str(rng.randint(self._low, self._high))
