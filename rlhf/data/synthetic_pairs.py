"""Generate preference pairs of the synthetic task, and judge responses to it.

Preferences follow Bradley-Terry: of two responses with gold scores a and b the first is preferred
with probability sigmoid((a - b) / TEMPERATURE), so the best accuracy that any reward model can
reach on a set of pairs is known. Training uses the preferences and never the gold score.

The two responses of most pairs differ only in their manners or only in their answers, and then
often in a single item: PPO exploits differences that a reward model was not trained to compare.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Collection, Iterator, Sequence

from rlhf.data.records import Record
from rlhf.data.synthetic import (
    NUMBERS,
    POLITE,
    RUDE,
    SKILLS,
    WORDS,
    prompt_of_request,
    rate_response,
    right_answer,
    skill_of,
)

TEMPERATURE = 0.07
RAMBLING = ("I like rain.", "Nice day today.", "The sea is blue.")

P_OPENINGS = {POLITE: 0.2, RUDE: 0.3, ("",): 0.5}  # probabilities of the openings of a response
P_RAMBLES = 0.4  # probability that words follow the answer
# Probabilities of the part in which the two responses of a pair differ.
P_DIFFERENCES = {"answer": 0.78, "manners": 0.1, "both": 0.12}
P_RIGHT = 0.82  # probability that the better answer is right; the other answer has a flaw

ATTEMPTS = 2000  # attempts to find a new prompt before a skill counts as used up


def _draw_manners(rng: random.Random) -> tuple[str, str]:
    """Return the texts before and after an answer; "" if there is none."""
    opening = rng.choice(rng.choices(list(P_OPENINGS), weights=list(P_OPENINGS.values()))[0])
    return opening, rng.choice(RAMBLING) if rng.random() < P_RAMBLES else ""


def render_response(items: list[str], manners: tuple[str, str]) -> str:
    """Return the answer between the texts of its ``manners``, as one text."""
    parts = [manners[0], " ".join(items) + ".", manners[1]]
    return " " + " ".join(part for part in parts if part)


Flaw = Callable[[list[str], random.Random], list[str]]


def _draw_other_item(item: str, items: list[str], rng: random.Random) -> str:
    """Return another item of the same kind, sometimes one that is easily mistaken for ``item``."""
    if item.isdigit():
        vocabulary, similar = NUMBERS, [*items, *(str(int(item) + step) for step in (-2, -1, 1, 2))]
    else:
        vocabulary, similar = WORDS, items
    pool = [other for other in vocabulary if other != item]
    mistaken = [other for other in similar if other in pool]
    return rng.choice(mistaken if mistaken and rng.random() < P_MISTAKEN else pool)


def _replace_one_item(items: list[str], rng: random.Random) -> list[str]:
    place = rng.randrange(len(items))
    wrong = _draw_other_item(items[place], items, rng)
    return [*items[:place], wrong, *items[place + 1 :]]


def _replace_several_items(items: list[str], rng: random.Random) -> list[str]:
    return [
        _draw_other_item(item, items, rng) if rng.random() < 0.7 else item  # noqa: PLR2004
        for item in items
    ]


def _add_item(items: list[str], rng: random.Random) -> list[str]:
    place = rng.randint(0, len(items))
    added = _draw_other_item(rng.choice(items), items, rng)
    return [*items[:place], added, *items[place:]]


def _remove_item(items: list[str], rng: random.Random) -> list[str]:
    place = rng.randrange(len(items))
    return items[:place] + items[place + 1 :]


def _swap_two_items(items: list[str], rng: random.Random) -> list[str]:
    swapped = list(items)
    if len(swapped) > 1:
        one, other = rng.sample(range(len(swapped)), 2)
        swapped[one], swapped[other] = swapped[other], swapped[one]
    return swapped


FLAWS: dict[str, Flaw] = {
    "one_wrong": _replace_one_item,
    "several_wrong": _replace_several_items,
    "one_too_many": _add_item,
    "repeated": lambda items, rng: items + items[-rng.randint(1, len(items)) :],
    "missing": _remove_item,
    "wrong_order": _swap_two_items,
}
FLAW_WEIGHTS = (8, 0.5, 0.5, 0.5, 0.5, 2)  # of FLAWS; flaws with small weights are hard to learn
MINIMAL_PAIRS = {  # names of minimal pairs -> names of their flaws
    "one_item_wrong": "one_wrong",
    "one_item_too_many": "one_too_many",
    "one_item_missing": "missing",
}
P_MISTAKEN = 0.5  # probability that a wrong item is another item of the answer, or a close number
P_NEIGHBOUR = 0.05  # probability that a flawed answer is the right answer to another request

# In the skill "next", the simulated people often forget to add one, but notice when others forget
# it: preferences can then teach what demonstrations teach badly.
P_FORGOTTEN = 0.5  # probability that a wrong answer repeats the prompt's number without adding one
P_NEITHER_RIGHT = 0.55  # probability that even the better answer repeats the prompt's number


def _forgets_to_add_one(prompt: str, probability: float, rng: random.Random) -> bool:
    return skill_of(prompt) == "next" and rng.random() < probability


def _answer_without_adding_one(prompt: str) -> list[str]:
    (one_more,) = right_answer(prompt)
    return [str(int(one_more) - 1)]


def _draw_wrong_answer(prompt: str, rng: random.Random) -> list[str]:
    if _forgets_to_add_one(prompt, P_FORGOTTEN, rng):
        return _answer_without_adding_one(prompt)
    right = right_answer(prompt)
    while True:
        if rng.random() < P_NEIGHBOUR:
            other = prompt_of_request(rng.choice(list(SKILLS.values())).draw_request(rng))
            answer = right_answer(other)
        else:
            (flaw,) = rng.choices(list(FLAWS.values()), FLAW_WEIGHTS)
            answer = flaw(right, rng)
        if answer and answer != right:
            return answer


def draw_candidates(prompt: str, rng: random.Random) -> tuple[str, str]:
    """Return two different responses of mixed quality.

    They differ in the answer's items, in the text around the answer, or in both.
    """
    difference = rng.choices(list(P_DIFFERENCES), weights=list(P_DIFFERENCES.values()))[0]
    while True:
        better = right_answer(prompt) if rng.random() < P_RIGHT else _draw_wrong_answer(prompt, rng)
        if _forgets_to_add_one(prompt, P_NEITHER_RIGHT, rng):
            better = _answer_without_adding_one(prompt)
        answers = [better, better if difference == "manners" else _draw_wrong_answer(prompt, rng)]
        manners = [_draw_manners(rng), _draw_manners(rng)]
        if difference == "answer":
            manners[1] = manners[0]
        first, second = map(render_response, answers, manners)
        if first != second:
            return first, second


def generate_records(count: int, *, seed: int) -> list[Record]:
    """Return ``count`` preference records with distinct prompts; every skill has the same share.

    Records are deterministic per ``seed``. Beyond 137,000 records the skills on numbers run out of
    prompts, and the other skills share the rest.
    """
    return [_draw_preference(prompt, rng) for prompt, rng in _draw_distinct_prompts(count, seed)]


def add_right_answers(records: Sequence[Record], columns: Collection[str]) -> list[Record]:
    """Return the records; add the right answer as column ``answer`` if ``columns`` is not empty."""
    if not columns:
        return list(records)
    return [
        record._replace(columns={"answer": " ".join(right_answer(record.prompt or ""))})
        for record in records
    ]


def _draw_distinct_prompts(count: int, seed: int) -> Iterator[tuple[str, random.Random]]:
    rng = random.Random(f"synthetic-{seed}")
    skills = list(SKILLS.values())
    seen: set[str] = set()
    while len(seen) < count:
        skill = skills[len(seen) % len(skills)]
        prompts = (prompt_of_request(skill.draw_request(rng)) for _ in range(ATTEMPTS))
        prompt = next((prompt for prompt in prompts if prompt not in seen), None)
        if prompt is None:
            skills.remove(skill)
            continue
        seen.add(prompt)
        yield prompt, rng


def _draw_preference(prompt: str, rng: random.Random) -> Record:
    first, second = draw_candidates(prompt, rng)
    if rng.random() >= preference_probability(_gold_gap(prompt, first, second)):
        first, second = second, first
    return Record(prompt=prompt, chosen=first, rejected=second)


def _gold_gap(prompt: str, first: str, second: str) -> float:
    return rate_response(prompt, first).gold - rate_response(prompt, second).gold


def preference_probability(gap: float) -> float:
    """Return the Bradley-Terry probability of choosing a response that scores ``gap`` higher."""
    return 1.0 / (1.0 + math.exp(-gap / TEMPERATURE))


class GoldJudge:
    """A judge that computes the gold score of responses, for evaluation or as a reward model."""

    def rate(self, prompt: str, response: str, *, ended: bool) -> dict[str, float]:
        """Return "gold" (score in [0, 1]), its components, and "exact" (1: right answer)."""
        parts = rate_response(prompt, response, ended=ended)
        return {"gold": parts.gold, "exact": float(parts.is_exact), **parts._asdict()}

    def minimal_pairs(self, prompt: str, *, seed: int) -> dict[str, tuple[str, str]]:
        """Return, for each of ``MINIMAL_PAIRS``, a right response and one with only its flaw.

        An answer of one item gets no pair with a missing item.
        """
        rng = random.Random(f"minimal pairs of {prompt} {seed}")
        items, manners = right_answer(prompt), (rng.choice(POLITE), "")
        right = render_response(items, manners)
        return {
            name: (right, render_response(FLAWS[flaw](items, rng), manners))
            for name, flaw in MINIMAL_PAIRS.items()
            if flaw != "missing" or len(items) > 1
        }

    def expected_gold_accuracy(self, records: list[Record]) -> float:
        """Return the expected accuracy on ``records`` of a reward model with exact gold scores."""
        gaps = (_gold_gap(r.prompt or "", r.chosen or "", r.rejected or "") for r in records)
        return sum(preference_probability(abs(gap)) for gap in gaps) / len(records)
