"""The moving average of the actor's weights, computed from its engine's master weights."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from rlhf.engine.masters import CHUNK, Masters, build_average_kernel
from rlhf.kernels.torch_adamw import Split, fp32_weights


class MovingAverage:
    """An exponential moving average of the master weights, in fp32 and sharded like them.

        average = beta * average + (1 - beta) * weights      after every optimizer step

    In half precision an update of (1 - beta) = 0.8 % would mostly be lost to rounding. With
    ``on_host`` the average is kept in the host's memory, pinned if the masters are on a GPU, and
    is copied to the masters' device in chunks for each update.
    """

    kind = "average"

    def __init__(self, masters: Masters, *, beta: float, on_host: bool = False) -> None:
        self._masters = masters
        self._beta = beta
        self._average = [
            _copy_weights(fp32_weights(shard), on_host=on_host) for shard in masters.shards
        ]
        self._kernel = None if on_host else build_average_kernel(masters.shards)

    @property
    def shards(self) -> Sequence[Tensor]:
        """Return this rank's shards of the average, in the order of the masters' shards."""
        self._finish_copies()
        return self._average

    @torch.no_grad()
    def update(self) -> None:
        """Update the average with the current weights."""
        if self._kernel is not None:
            splits = [shard for shard in self._masters.shards if isinstance(shard, Split)]
            self._kernel.update_averages(self._average, splits, 1.0 - self._beta)
            return
        for average, shard in zip(self._average, self._masters.shards, strict=True):
            parts = average.view(-1), fp32_weights(shard).reshape(-1)
            for part, weights in zip(*(torch.split(x, CHUNK) for x in parts), strict=True):
                on_device = part.to(weights.device, non_blocking=True)
                part.copy_(on_device.lerp_(weights, 1.0 - self._beta), non_blocking=True)

    @contextmanager
    def swap_in(self) -> Iterator[None]:
        """Swap the average into the model within the context; every rank must enter and leave."""
        self._swap_weights()
        try:
            yield
        finally:
            self._swap_weights()

    def _finish_copies(self) -> None:
        """Wait for the asynchronous copies to the host that ``update`` started."""
        for average in self._average:
            if average.is_pinned():
                torch.cuda.synchronize()
                return

    @torch.no_grad()
    def _swap_weights(self) -> None:
        self._finish_copies()
        for average, shard in zip(self._average, self._masters.shards, strict=True):
            weights = fp32_weights(shard).to(average.device, copy=True)
            if isinstance(shard, Split):
                shard.split(average)
            else:
                shard.data.copy_(average)
            average.copy_(weights)
        self._masters.publish()


def _copy_weights(weights: Tensor, *, on_host: bool) -> Tensor:
    device = torch.device("cpu") if on_host else weights.device
    is_pinned = device != weights.device
    copy = torch.empty(weights.shape, dtype=weights.dtype, device=device, pin_memory=is_pinned)
    return copy.copy_(weights)
