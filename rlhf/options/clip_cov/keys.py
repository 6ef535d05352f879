"""Keys of PPO that leave tokens with a high covariance out of the loss."""

from __future__ import annotations

from dataclasses import dataclass

from rlhf.config.schema.keys import FROM_0_TO_1, SCORE, key, needs

ON = needs("clip_cov_ratio", fix="add {key}=2e-4")


@dataclass(kw_only=True)
class ClipCovKeys:
    """Keys of the group ``ppo`` for Clip-Cov."""

    clip_cov_ratio: float = key(FROM_0_TO_1)
    """Clip-Cov: share of tokens, but at least one, to leave out of a step's losses at random, among
    those whose log-prob and advantage have a high covariance (2e-4 in the paper); 0: none."""
    clip_cov_low: float = key(SCORE, unread=[ON])
    """Covariance of a token above which clip_cov_ratio may leave it out."""
    clip_cov_high: float = key(SCORE, unread=[ON])
    """Covariance of a token from which clip_cov_ratio never leaves it out."""
