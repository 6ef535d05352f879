"""Keys for the layers that actor, critic and reference share."""

from __future__ import annotations

from dataclasses import dataclass

from rlhf.config.schema.keys import ABOVE_0, AT_LEAST_0, key, needs

SHARED = needs("shared_trunk", "true")


@dataclass(kw_only=True)
class TrunkKeys:
    """Keys of the group ``ppo`` for the layers that actor, critic and reference share."""

    shared_trunk: bool
    """Let critic and reference share the actor's lower layers (trlx's hydra model)."""
    num_layers_unfrozen: int | None = key(ABOVE_0, unread=[SHARED])
    """Top layers that a shared trunk trains; the reference is a frozen copy. null: not shared."""
    num_value_layers: int = key(AT_LEAST_0, unread=[SHARED])
    """Top layers that the critic of a shared trunk does not share; 0: only its value head."""
