"""Key for digests of the weights."""

from __future__ import annotations

from dataclasses import dataclass

from rlhf.base.stored_files import DIGESTS
from rlhf.config.schema.keys import AT_LEAST_0, key

LOG = DIGESTS.name  # file in the run directory with the digests


@dataclass(kw_only=True)
class DigestKeys:
    """Keys of the group ``checkpoint`` for digests of the weights."""

    digest_every: int = key(AT_LEAST_0)
    """Steps between digests of the weights, which python -m rlhf.replay compares; 0: no digests."""
