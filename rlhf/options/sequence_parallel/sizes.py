"""Number of ranks that share each row of a batch."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rlhf.config.schema.run import RunConfig

SHARING_KEY = "zero.sequence_parallel_size"


def ranks_per_sequence(config: RunConfig) -> int:
    """Return the number of ranks that share each sequence."""
    return config.zero.sequence_parallel_size
