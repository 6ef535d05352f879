"""Rewards with a known accuracy and spread, for ``reward_variance.py``: functions of ``rewards``.

All have the same spread over responses to different prompts, from an offset for each prompt.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from rlhf.data.synthetic import rate_response

FLATNESS = 0.05  # what a flat reward keeps of the differences between responses to one prompt
NOISE = 0.3  # deviation of what a noisy reward adds to the gold score of a response


def accurate(prompts: Sequence[str], responses: Sequence[str]) -> list[float]:
    """Order all responses as the judge does, with the judge's differences."""
    return [_gold(*pair) + _offset(pair[0]) for pair in zip(prompts, responses, strict=True)]


def accurate_flat(prompts: Sequence[str], responses: Sequence[str]) -> list[float]:
    """Order all responses as the judge does, but with small differences."""
    pairs = zip(prompts, responses, strict=True)
    return [FLATNESS * _gold(*pair) + _offset(pair[0]) for pair in pairs]


def noisy(prompts: Sequence[str], responses: Sequence[str]) -> list[float]:
    """Order many pairs of responses wrongly: a fixed error is added to each response."""
    pairs = zip(prompts, responses, strict=True)
    return [_gold(*pair) + _offset(pair[0]) + NOISE * _draw(*pair) for pair in pairs]


def _gold(prompt: str, response: str) -> float:
    return rate_response(prompt, response).gold


def _offset(prompt: str) -> float:
    return _draw(prompt, "")


def _draw(prompt: str, response: str) -> float:
    """Return a normal draw that only the two texts decide."""
    return random.Random(f"{prompt}\n{response}").gauss(0.0, 1.0)
