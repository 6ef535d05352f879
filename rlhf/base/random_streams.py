"""Named random streams: each purpose has its own stream, so a new stream changes no other.

Every stream is keyed by its purpose and time (a step, an epoch), never by how often it was used: a
resumed run draws the same numbers as a run that never stopped.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rlhf.base.hashing import sha256_of


def seed_for(seed: int, *names: str | int) -> int:
    """Return the seed (63 bits) of the stream called ``names`` in a run with this ``seed``."""
    text = "/".join(str(part) for part in (seed, *names))
    return int(sha256_of(text.encode())[:16], 16) >> 1


def random_stream(seed: int, *names: str | int) -> torch.Generator:
    """Return the CPU generator of the stream ``names``: GPU runs draw the same numbers from it."""
    return torch.Generator().manual_seed(seed_for(seed, *names))


def seed_dropout(seed: int, phase: str, step: int, *, rank: int) -> None:
    """Seed torch's global generator, from which dropout draws, for one step of a phase."""
    torch.manual_seed(seed_for(seed, "dropout", phase, step, rank))


class Shuffle:
    """An endless shuffled pass over ``size`` examples, with a new order for each epoch."""

    def __init__(self, size: int, *, seed: int) -> None:
        self._size = size
        self._seed = seed
        self._epoch = -1
        self._order: Tensor = torch.empty(0, dtype=torch.long)

    def batch_indices(self, step: int, batch_size: int) -> list[int]:
        """Return the example indices of batch ``step``; steps may be requested in any order."""
        start = step * batch_size
        return [self._example_at(position) for position in range(start, start + batch_size)]

    def _example_at(self, position: int) -> int:
        epoch, index = divmod(position, self._size)
        if epoch != self._epoch:
            generator = random_stream(self._seed, "epoch", epoch)
            self._epoch, self._order = epoch, torch.randperm(self._size, generator=generator)
        return int(self._order[index])
