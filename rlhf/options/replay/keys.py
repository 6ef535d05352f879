"""Key of the checkpoints' group that stores digests of the weights."""

from __future__ import annotations

from dataclasses import dataclass

from rlhf.config.schema.keys import AT_LEAST_0, key

LOG = "digests.jsonl"  # in a run directory


@dataclass(kw_only=True)
class DigestKeys:
    """Part of the group ``checkpoint``."""

    digest_every: int = key(AT_LEAST_0)
    """Steps between digests of the weights, which python -m rlhf.replay compares; 0: no digests."""
