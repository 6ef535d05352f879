"""Keys of PPO for a reference that follows the policy."""

from __future__ import annotations

from dataclasses import dataclass

from rlhf.config.schema.keys import ABOVE_0_TO_1, AT_LEAST_0, key, needs


@dataclass(kw_only=True)
class MovingReferenceKeys:
    """Keys of the group ``ppo`` for the moving reference."""

    reference_every: int = key(AT_LEAST_0)
    """PPO steps after which the reference of the KL penalty moves towards the policy; 0: never."""
    reference_share: float = key(
        ABOVE_0_TO_1, unread=[needs("reference_every", fix="add {key}=STEPS")]
    )
    """Share of the policy's weights in the moved reference; 1: a copy of the policy."""
