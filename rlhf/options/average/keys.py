"""Keys of the moving average: its decay, and where it is stored."""

from __future__ import annotations

from dataclasses import dataclass

from rlhf.config.schema.keys import FROM_0_BELOW_1, key, needs


@dataclass(kw_only=True)
class AverageKeys:
    """Keys of the group ``ppo`` for the moving average of the actor's weights."""

    ema_beta: float = key(FROM_0_BELOW_1)
    """Decay per optimizer step of a moving average of the actor's weights; 0: no average."""


@dataclass(kw_only=True)
class AverageOffloadKeys:
    """Keys of the group ``zero`` for the memory that holds the moving average."""

    offload_ema: bool = key(unread=[needs("ppo.ema_beta", fix="add {key}=0.992")])
    """Keep the moving average of the actor's weights in the host's memory."""
