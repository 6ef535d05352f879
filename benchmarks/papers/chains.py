"""A task whose horizon is known: count letters on from a letter, one decision for each letter.

Demonstrations have wrong letters, which imitation learns too. The rewards are functions of
``rewards``: the share of right letters, the share before the first wrong one, or 1 only for a whole
right answer, with or without an error that the two texts decide; as prompts hardly repeat, it is
fresh noise to the learner.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Sequence
from itertools import takewhile
from pathlib import Path

LETTERS = "ABCDEFGHIJKL"
SIZE = 8  # letters that are counted, unless the prompt names another number
ROWS = 6000
SHARE_WRONG = 0.3  # of the letters of demonstrations, where each right letter counts
WHOLE_RIGHT = 0.15  # of the demonstrations, where only whole answers count
NOISE = 2.0  # deviation of the error, in deviations of the score over demonstrations
_ASKED = re.compile(r"count (\d+) from ([A-L])(?: by (\d) of (\d+))?")
Reward = Callable[[Sequence[str], Sequence[str]], list[float]]


def share(prompts: Sequence[str], responses: Sequence[str]) -> list[float]:
    """Return the share of right letters of each response."""
    return [_share(*pair) for pair in zip(prompts, responses, strict=True)]


def whole(prompts: Sequence[str], responses: Sequence[str]) -> list[float]:
    """Return 1 for each response without a fault, and otherwise 0."""
    return [_whole(*pair) for pair in zip(prompts, responses, strict=True)]


def prefix(prompts: Sequence[str], responses: Sequence[str]) -> list[float]:
    """Return the share of letters before the first wrong one of each response."""
    return [_prefix(*pair) for pair in zip(prompts, responses, strict=True)]


def add_error(reward: Reward, *, deviation: float) -> Reward:
    """Return a reward that adds to ``reward`` a normal error of this deviation."""

    def noisy(prompts: Sequence[str], responses: Sequence[str]) -> list[float]:
        pairs = zip(prompts, responses, reward(prompts, responses), strict=True)
        return [score + _error(*pair, deviation=deviation / NOISE) for *pair, score in pairs]

    return noisy


def noisy_share(prompts: Sequence[str], responses: Sequence[str]) -> list[float]:
    """Return the share of right letters with an error."""
    return [
        _share(prompt, response) + _error(prompt, response, deviation=_share_deviation(prompt))
        for prompt, response in zip(prompts, responses, strict=True)
    ]


def noisy_whole(prompts: Sequence[str], responses: Sequence[str]) -> list[float]:
    """Return 1 or 0 as ``whole`` does, with an error."""
    deviation = (WHOLE_RIGHT * (1 - WHOLE_RIGHT)) ** 0.5
    return [
        _whole(*pair) + _error(*pair, deviation=deviation)
        for pair in zip(prompts, responses, strict=True)
    ]


def write_rows(path: Path, *, horizon: int, wrong: float, by: int = 1, size: int = SIZE) -> None:
    """Write prompts and demonstrations, whose letters are wrong with probability ``wrong``.

    The answers count each ``by``-th of the first ``size`` letters, round and round.
    """
    rng = random.Random(1)
    lines = []
    for _ in range(ROWS):
        prompt = draw_prompt(rng, horizon=horizon, by=by, size=size)
        completion = f" {demonstrate(rng, prompt, wrong=wrong)}"
        lines.append(json.dumps({"prompt": prompt, "completion": completion}) + "\n")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(lines), encoding="utf-8")


def draw_prompt(rng: random.Random, *, horizon: int, by: int = 1, size: int = SIZE) -> str:
    """Return a prompt that asks for ``horizon`` letters."""
    more = "" if (by, size) == (1, SIZE) else f" by {by} of {size}"
    question = f"{rng.randrange(1000)} count {horizon} from {rng.choice(LETTERS[:size])}{more}"
    return f"\n\nHuman: {question}\n\nAssistant:"


def demonstrate(rng: random.Random, prompt: str, *, wrong: float) -> str:
    """Return an answer whose letters are wrong with probability ``wrong``."""
    *_, size = _asked(prompt)
    return "".join(
        rng.choice(LETTERS[:size].replace(letter, "")) if rng.random() < wrong else letter
        for letter in right_answer(prompt)
    )


def right_answer(prompt: str) -> str:
    """Return the letters that the prompt asks for."""
    horizon, first, by, size = _asked(prompt)
    start = LETTERS.index(first)
    return "".join(LETTERS[(start + by * (place + 1)) % size] for place in range(horizon))


def _asked(prompt: str) -> tuple[int, str, int, int]:
    found = _ASKED.search(prompt)
    if found is None:
        raise ValueError(f"no question of this task: {prompt!r}")
    return int(found[1]), found[2], int(found[3] or 1), int(found[4] or SIZE)


def _share(prompt: str, response: str) -> float:
    answer = right_answer(prompt)
    return sum(a == b for a, b in zip(answer, response.strip(), strict=False)) / len(answer)


def _prefix(prompt: str, response: str) -> float:
    answer = right_answer(prompt)
    pairs = zip(answer, response.strip(), strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs)) / len(answer)


def _whole(prompt: str, response: str) -> float:
    return float(response.strip() == right_answer(prompt))


def _share_deviation(prompt: str) -> float:
    return (SHARE_WRONG * (1 - SHARE_WRONG) / _asked(prompt)[0]) ** 0.5


def _error(prompt: str, response: str, *, deviation: float) -> float:
    draw = random.Random(f"{prompt}\n{response}").gauss(0.0, 1.0)
    return NOISE * deviation * draw
