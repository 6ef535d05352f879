"""Rewards without a signal, for the scenarios of ``alarm_rates.py``: functions of ``rewards``."""

from __future__ import annotations

import math
from collections.abc import Sequence


def always(_prompts: Sequence[str], _responses: Sequence[str]) -> list[float]:
    """Fail for every response."""
    raise RuntimeError("this reward always fails")


def often(_prompts: Sequence[str], responses: Sequence[str]) -> list[float]:
    """Fail for about every third response; prefer short responses."""
    return [_shortness(each) if len(each) % 3 else math.nan for each in responses]


def rarely(_prompts: Sequence[str], responses: Sequence[str]) -> list[float]:
    """Fail for about one in fifty responses; prefer short responses."""
    return [_shortness(each) if len(each) % 50 else math.nan for each in responses]


def by_prompt(prompts: Sequence[str], _responses: Sequence[str]) -> list[float]:
    """Return 1 for every response to about half of the prompts, and 0 to the others."""
    return [float(len(each) % 2) for each in prompts]


def beyond_clip(_prompts: Sequence[str], responses: Sequence[str]) -> list[float]:
    """Prefer short responses, with scores far above ``ppo.clip_reward_value``."""
    return [1000 + _shortness(each) for each in responses]


def _shortness(response: str) -> float:
    return -len(response) / 100
