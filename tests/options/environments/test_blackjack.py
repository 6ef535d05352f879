"""Blackjack against exact dynamic programming, and the program that computes its optimum.

``python -m tests.options.environments.test_blackjack`` prints the largest expected return.
"""

import re
from collections import Counter
from collections.abc import Mapping
from fractions import Fraction
from functools import cache
from itertools import product
from math import sqrt
from random import Random

import pytest

from rlhf.options.environments.embedded import (
    BUST,
    CARDS,
    DEALER_STANDS,
    Blackjack,
    hand_value,
)
from tests.options.environments.test_embedded import episode

CHANCES = {card: Fraction(count, len(CARDS)) for card, count in Counter(CARDS).items()}


@cache
def dealer_ends(hard: int, has_ace: bool) -> Mapping[int, Fraction]:
    """Probability of each final value of the dealer, 22 for more than 21; aces count 1 in hard."""
    value = hard + 10 if has_ace and hard + 10 <= BUST else hard
    if value >= DEALER_STANDS:
        return {min(value, BUST + 1): Fraction(1)}
    ends: Counter[int] = Counter()
    for card, chance in CHANCES.items():
        for end, part in dealer_ends(hard + card, has_ace or card == 1).items():
            ends[end] += chance * part
    return ends


@cache
def value_of_sticking(value: int, shown: int) -> Fraction:
    total = Fraction(0)
    for end, chance in dealer_ends(shown, shown == 1).items():
        total += chance * (1 if end > BUST or value > end else -1 if value < end else 0)
    return total


@cache
def values(hard: int, has_ace: bool, shown: int) -> tuple[Fraction, Fraction]:
    """Expected return of hitting and of sticking, with perfect play afterwards."""
    hit = Fraction(0)
    for card, chance in CHANCES.items():
        after = (hard + card, has_ace or card == 1, shown)
        hit += chance * (max(values(*after)) if hard + card <= BUST else -1)
    value = hard + 10 if has_ace and hard + 10 <= BUST else hard
    return hit, value_of_sticking(value, shown)


def largest_return() -> Fraction:
    total = Fraction(0)
    for first, second, shown in product(CHANCES, repeat=3):
        chance = CHANCES[first] * CHANCES[second] * CHANCES[shown]
        total += chance * max(values(first + second, 1 in (first, second), shown))
    return total


def best_turn(observation: str) -> str:
    soft, value, shown = re.fullmatch(r"you (soft )?(\d+) dealer (\d+)", observation).groups()
    hard = int(value) - 10 if soft else int(value)
    hit, stick = values(hard, bool(soft), int(shown))
    return "hit" if hit > stick else "stick"


def test_the_optimum_is_exact() -> None:
    assert Blackjack.optimum == pytest.approx(float(largest_return()), abs=5e-6)


def test_perfect_play_reaches_the_optimum_and_others_do_not() -> None:
    episodes = 6000
    rng = Random(0)
    players = {
        "best": lambda env, observation: best_turn(observation),
        "expert": lambda env, _: env.demonstration(),
        "random": lambda env, _: env.random_turn(rng),
    }
    means = {}
    for name, play in players.items():
        env = Blackjack()
        found = (episode(env, seed, play)[-1][1].reward for seed in range(episodes))
        means[name] = sum(found) / episodes
    assert abs(means["best"] - Blackjack.optimum) < 3 * 0.95 / sqrt(episodes)
    assert means["random"] < means["expert"] - 0.1 < means["best"] - 0.2


def test_an_ace_counts_11_where_it_can_and_a_turn_that_cannot_be_read_loses() -> None:
    hands = {(1, 6): (17, True), (1, 6, 10): (17, False), (1, 1): (12, True), (1, 10): (21, True)}
    hands |= {(1, 1, 10): (12, False), (1, 10, 10): (21, False)}  # 22 with an ace of 11
    assert {cards: hand_value([*cards]) for cards in hands} == hands
    env = Blackjack()
    env.reset(seed=0, row={})
    step = env.step("double")
    assert (step.reward, step.terminated, step.info["malformed"]) == (-1, True, True)
    env.reset(seed=0, row={})
    assert not env.step(" Stick\n").info["malformed"]


if __name__ == "__main__":
    print(float(largest_return()), largest_return())
