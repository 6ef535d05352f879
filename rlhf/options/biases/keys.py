"""Keys of a part of ``rewards`` with kind=bias."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from rlhf.config.choices import RewardKind
from rlhf.config.schema.keys import AT_LEAST_0, key

REWARDS = {RewardKind.bias: ("kind", "weight", "timeout_seconds", "bias*", "pattern", "onset")}

RewardBias = StrEnum("RewardBias", "length token sycophancy position format")
"""What a bias favours; ``rewards.py`` defines each."""


@dataclass(kw_only=True)
class BiasKeys:
    """Keys of a part of ``rewards`` that corrupts the score."""

    bias: RewardBias | None = None
    """kind=bias: what corrupts the score: length, token, sycophancy, position or format."""
    onset: int = key(AT_LEAST_0, default=0)
    """kind=bias: first PPO step whose responses the bias scores; 0: from the start."""
