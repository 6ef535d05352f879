"""The fp32 weights that an optimiser updates, wherever ZeRO keeps them, and their average."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from rlhf.engine.ds_config import SHARDED_PARAMETERS


class Masters(NamedTuple):
    """This rank's share of the fp32 weights, and how a change of them reaches the model."""

    shards: list[Tensor]
    publish: Callable[[], None]


def masters_of(engine: Any, *, stage: int) -> Masters:
    """The masters of a trained DeepSpeed engine.

    At stage 0 they are the weights themselves; from stage 1 on each rank holds flat parts of them.
    """
    optimizer = engine.optimizer
    if stage == 0:
        return Masters(_trained(engine.module), lambda: None)
    if stage == SHARDED_PARAMETERS:
        return Masters(optimizer.fp32_partitioned_groups_flat, lambda: _publish_sharded(optimizer))
    return Masters(optimizer.single_partition_of_fp32_groups, optimizer.update_lp_params)


def _trained(module: nn.Module) -> list[Tensor]:
    return [parameter for parameter in module.parameters() if parameter.requires_grad]


def _publish_sharded(optimizer: Any) -> None:
    """What DeepSpeed 0.19.8 does itself after a step of stage 3."""
    for group in range(len(optimizer.fp32_partitioned_groups_flat)):
        optimizer._reassign_or_swap_out_partitioned_parameters(group)
    if optimizer.persistent_parameters:
        optimizer.persistent_parameters[0].all_gather(optimizer.persistent_parameters)


class MovingAverage:
    """Exponential moving average of the masters, in fp32 and sharded as they are.

        average = beta * average + (1 - beta) * weights      after every optimiser step

    In half precision a step of (1 - beta) = 0.8 % would mostly be lost to rounding.
    """

    def __init__(self, masters: Masters, *, beta: float) -> None:
        self._masters = masters
        self._beta = beta
        self._average = [shard.detach().float().clone() for shard in masters.shards]

    @torch.no_grad()
    def update(self) -> None:
        """Take in the weights as they are now."""
        for average, shard in zip(self._average, self._masters.shards, strict=True):
            average.lerp_(shard.detach().float(), 1.0 - self._beta)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """The model computes with its average; every rank must enter and leave."""
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    @torch.no_grad()
    def _exchange(self) -> None:
        for average, shard in zip(self._average, self._masters.shards, strict=True):
            weights = shard.detach().clone()
            shard.data.copy_(average)
            average.copy_(weights)
        self._masters.publish()
