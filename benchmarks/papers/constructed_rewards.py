"""Rewards that are known functions of the gold score: functions of ``rewards``.

Those of ``reward_variance.py`` have the same spread over responses to different prompts, from an
offset for each prompt. ``worst_of_three`` is a cure of ``hacking.py``.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence

from rlhf.data.synthetic import rate_response
from rlhf_lab.biases.bias_scores import (
    PromptedResponse,
    favour_format,
    favour_length,
    favour_token,
)

FLATNESS = 0.05  # what a flat reward keeps of the differences between responses to one prompt
NOISE = 0.3  # deviation of what a noisy reward adds to the gold score of a response
BIASED_TOKEN = "Whatever"
BIAS_STRENGTH = 4.0  # of each of the three judges' biases; gold has strength 1


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


def worst_of_three(prompts: Sequence[str], responses: Sequence[str]) -> list[float]:
    """Return the lowest score of three judges: gold, with a bias for a token, length or format."""
    token = re.compile(BIASED_TOKEN)

    def worst(prompt: str, response: str) -> float:
        answer = PromptedResponse(prompt, response, tokens=len(response.split()))
        biases = (favour_token(token, answer), favour_length(answer), favour_format(answer))
        return _gold(prompt, response) + BIAS_STRENGTH * min(biases)

    return [worst(*pair) for pair in zip(prompts, responses, strict=True)]


def _gold(prompt: str, response: str) -> float:
    return rate_response(prompt, response).gold


def _offset(prompt: str) -> float:
    return _draw(prompt, "")


def _draw(prompt: str, response: str) -> float:
    """Return a normal draw that only the two texts decide."""
    return random.Random(f"{prompt}\n{response}").gauss(0.0, 1.0)
