"""Define the synthetic task: generated requests whose answers can be checked by a rule.

A prompt asks for one of eight skills. A response is rated by its **gold score** in [0, 1]; manners
count in proportion to the correctness of the answer:

    gold = correct * (0.76 + 0.12 * polite + 0.12 * stops)

docs/generated_task.md defines the three parts.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

MANNERS_WEIGHT = 0.12  # weight of ``polite`` in the gold score, and also of ``stops``
NO_OPENING = 0.2  # politeness of a response without an opening
POLITE = ("Sure!", "Gladly!", "Happily!")
RUDE = ("Ugh.", "Whatever.", "Boring.")

WORDS = (
    "anchor apple boat brush candle carpet drum eagle feather fig garden hammer island jacket "
    "kiwi ladder lamp mirror nest onion piano pillow queen river spoon tiger tunnel violin "
    "wallet window yarn zebra"
).split()
NAMES = "Ann Bob Cid Dora Eve Finn Gus Hana".split()
NUMBERS = [str(number) for number in range(13)]


def _draw_words(rng: random.Random) -> str:
    return " ".join(rng.sample(WORDS, 3))


def _draw_numbers(rng: random.Random) -> str:
    return " ".join(rng.sample(NUMBERS, 4))


def _draw_addition(rng: random.Random) -> str:
    giver, taker = rng.sample(NAMES, 2)
    return f"{taker}: {rng.choice(NUMBERS[:-1])} {rng.choice(WORDS)}, {giver}"


# Functions that draw the items of a request -> regular expressions that match these items.
PATTERNS: dict[Callable[[random.Random], str], str] = {
    _draw_words: r"[\w ]+",
    _draw_numbers: r"[\d ]+",
    _draw_addition: r"\w+: \d+ \w+, \w+",
}


class Skill(NamedTuple):
    """A kind of request: its text, and functions that draw its items and compute the answer."""

    text: str
    draw: Callable[[random.Random], str]
    solve: Callable[[list[str]], list[str]]

    def draw_request(self, rng: random.Random) -> str:
        """Return a random request."""
        return self.text.format(self.draw(rng))

    def parse_request(self, request: str) -> list[str] | None:
        """Return the items of a request; None if the request is for another skill."""
        before, after = self.text.split("{}")
        items = request.removeprefix(before).removesuffix(after)
        is_match = request == self.text.format(items) and re.fullmatch(PATTERNS[self.draw], items)
        return items.split() if is_match else None


SKILLS: dict[str, Skill] = {
    "copy": Skill("Repeat this: {}.", _draw_words, lambda items: items),
    "reverse": Skill("Say it backwards: {}.", _draw_words, lambda items: items[::-1]),
    "sort": Skill("Sort these numbers: {}.", _draw_numbers, lambda items: sorted(items, key=int)),
    "largest": Skill(
        "Which is the largest of {}?", _draw_numbers, lambda items: [max(items, key=int)]
    ),
    "next": Skill("{} adds one. Together?", _draw_addition, lambda items: [str(int(items[1]) + 1)]),
    "ends": Skill("Give the first and last of these: {}.", _draw_words, lambda items: items[::2]),
    "format": Skill("Put in brackets: {}.", _draw_words, lambda items: ["(", *items, ")"]),
    "repeat": Skill("Say the last one twice: {}.", _draw_words, lambda items: items[-1:] * 2),
}


def prompt_of_request(request: str) -> str:
    """Return the prompt whose only human turn is the request."""
    return f"\n\nHuman: {request}\n\nAssistant:"


def skill_of(prompt: str) -> str:
    """Return the name of the skill that ``prompt`` asks for."""
    return _match_skill(prompt)[0]


def right_answer(prompt: str) -> list[str]:
    """Return the items of the right answer to ``prompt``."""
    name, items = _match_skill(prompt)
    return SKILLS[name].solve(list(items))  # a copy: _match_skill caches ``items``


@lru_cache(maxsize=16)  # the same prompt is matched several times in succession
def _match_skill(prompt: str) -> tuple[str, list[str]]:
    """Return the name of the prompt's skill and the request's items, or raise a ValueError."""
    request = prompt.removeprefix("\n\nHuman: ").removesuffix("\n\nAssistant:")
    for name, skill in SKILLS.items():
        if (items := skill.parse_request(request)) is not None:
            return name, items
    raise ValueError(f"not a prompt of the synthetic task: {prompt!r}")


class GoldComponents(NamedTuple):
    """The parts of a gold score, each in [0, 1]; docs/generated_task.md defines them."""

    correct: float
    polite: float
    stops: float

    @property
    def gold(self) -> float:
        """Return the gold score, in [0, 1]."""
        manners = MANNERS_WEIGHT * (self.polite + self.stops)
        return self.correct * (1 - 2 * MANNERS_WEIGHT + manners)

    @property
    def is_exact(self) -> bool:
        """Return True if the answer is exactly right."""
        return self.correct == 1.0


def split_response(response: str) -> tuple[str, str, str]:
    """Return a response's opening, its answer up to the first full stop, and the rest."""
    text = response.strip()
    opening = next((o for o in (*POLITE, *RUDE) if text.startswith(o)), "")
    answer, _, rest = text.removeprefix(opening).partition(".")
    return opening, answer, rest


def rate_response(prompt: str, response: str, *, ended: bool = True) -> GoldComponents:
    """Return the gold score's components; ``ended`` is False if ``response`` was cut off.

    The answer is the text after the polite or rude opening, up to the first full stop or the end
    of the text; its items are separated by spaces.
    """
    expected = right_answer(prompt)
    opening, answer, rest = split_response(response)
    items = answer.split()
    matches = sum(a == b for a, b in zip(expected, items, strict=False))
    share = matches / max(len(expected), len(items))
    return GoldComponents(
        correct=1.0 if items == expected else share / 2,
        polite=1.0 if opening in POLITE else 0.0 if opening else NO_OPENING,
        stops=max(0.0, 1.0 - len(rest.split()) / 4) if ended else 0.0,
    )
