"""Key that lets several ranks share each sequence."""

from __future__ import annotations

from dataclasses import dataclass

from rlhf.config.schema.keys import ABOVE_0, key

ON_ONE_RANK = {"zero.sequence_parallel_size": 1}


@dataclass(kw_only=True)
class SequenceParallelKeys:
    """Keys of the group ``zero`` for the number of ranks that share each sequence."""

    sequence_parallel_size: int = key(ABOVE_0)
    """Ranks of a node that share each sequence (Ulysses), in a run of SFT only; 1: none."""
