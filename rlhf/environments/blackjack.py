"""Blackjack with the rules of gymnasium's Blackjack-v1 and its default options.

The deck is infinite, the dealer stands on every 17, a natural wins no extra, and the player can
only hit or stick. Source: Sutton and Barto, Reinforcement Learning, 2nd edition, example 5.1.
"""

from __future__ import annotations

from collections.abc import Mapping
from random import Random
from typing import Any

from rlhf.environments.interface import Step

CARDS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 10, 10, 10)  # an ace is 1; equally likely
BUST, DEALER_STANDS, EXPERT_STICKS = 21, 17, 17
EXPERT_ERRS = 0.3  # part of the expert's turns that are random
TURNS = ("hit", "stick")


class Blackjack:
    """A hand of blackjack; the reward is 1 for a win, 0 for a draw and -1 for a loss."""

    optimum = -0.046556  # of perfect play, computed by tests/environments/test_blackjack.py

    def reset(self, *, seed: int, row: Mapping[str, Any]) -> str:  # noqa: ARG002 - needs no data
        """Deal two cards to the dealer, of which one is shown, and two to the player."""
        self._deck = Random(seed)
        self._expert = Random(f"expert {seed}")  # its choices do not change the cards
        self._dealer = [self._draw(), self._draw()]
        self._player = [self._draw(), self._draw()]
        return self._shown()

    def step(self, text: str) -> Step:
        """Hit or stick; any other text loses the hand.

        A turn that had no effect could be repeated until the episode is cut, with return 0, which
        is more than perfect play wins.
        """
        turn = text.strip().lower()
        if turn == "hit":
            self._player.append(self._draw())
            if hand_value(self._player)[0] <= BUST:
                return Step(self._shown(), info={"success": False})
            return self._end(-1.0)
        if turn == "stick":
            while hand_value(self._dealer)[0] < DEALER_STANDS:
                self._dealer.append(self._draw())
            player, dealer = hand_value(self._player)[0], hand_value(self._dealer)[0]
            if dealer > BUST:
                return self._end(1.0)
            return self._end(float(player > dealer) - float(player < dealer))
        return self._end(-1.0, malformed=True)

    def demonstration(self) -> str:
        """Stick at 17 and more whatever the dealer shows, apart from random turns."""
        if self._expert.random() < EXPERT_ERRS:
            return self._expert.choice(TURNS)
        return "stick" if hand_value(self._player)[0] >= EXPERT_STICKS else "hit"

    def random_turn(self, rng: Random) -> str:
        """Hit or stick at random."""
        return rng.choice(TURNS)

    def _draw(self) -> int:
        return self._deck.choice(CARDS)

    def _shown(self) -> str:
        value, is_soft = hand_value(self._player)
        return f"you {'soft ' if is_soft else ''}{value} dealer {self._dealer[0]}"

    def _end(self, reward: float, *, malformed: bool = False) -> Step:
        info = {"success": reward > 0, "malformed": malformed}
        return Step("", reward=reward, terminated=True, info=info)


def hand_value(cards: list[int]) -> tuple[int, bool]:
    """Return the value of a hand, and True if an ace in it counts 11 instead of 1."""
    value = sum(cards)
    is_soft = 1 in cards and value + 10 <= BUST
    return (value + 10 if is_soft else value), is_soft
