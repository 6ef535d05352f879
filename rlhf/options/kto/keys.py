"""Keys of the dpo phase for the loss of marks."""

from __future__ import annotations

from dataclasses import dataclass

from rlhf.config.schema.keys import ABOVE_0, Unread, key

ON_PAIRS = (
    Unread(
        lambda dpo: dpo.unpaired is None,
        "{group}.loss learns from pairs",
        "add {group}.loss=kto",
    ),
)


@dataclass(kw_only=True)
class KtoKeys:
    """Keys of the group ``dpo`` for loss=kto."""

    desirable_weight: float = key(ABOVE_0, unread=ON_PAIRS)
    """Weight of good responses in loss=kto."""
    undesirable_weight: float = key(ABOVE_0, unread=ON_PAIRS)
    """Weight of bad responses in loss=kto."""
