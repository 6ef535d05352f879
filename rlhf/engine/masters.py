"""Masters: the fp32 weights that an optimizer updates, whole or sharded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from rlhf.base.seams import AverageKernel
from rlhf.config.roles import SHARDED_WEIGHTS
from rlhf.options import kernels_for

CHUNK = 2**24  # elements copied from the host to the GPU, or back, at once


class Split(NamedTuple):
    """fp32 weights in two halves: bf16 weights, which the model uses, and the remaining 16 bits.

    As integers, weights = 65536 * high + low, with low from -32768 to 32767: ``high`` is the
    nearest bf16 number, and high and low together are exact. Ties are rounded away from zero,
    because the usual rounding to even would also need a low of +32768.
    """

    high: Tensor  # bf16
    low: Tensor  # int16

    def join(self, out: Tensor, spare: Tensor) -> Tensor:
        """Write the fp32 weights to ``out`` and return ``out``; ``spare`` is fp32 scratch space."""
        out.copy_(self.high)
        low = spare.view(torch.int32)
        out.view(torch.int32).add_(low.copy_(self.low))
        return out

    def split(self, weights: Tensor) -> None:
        """Store fp32 ``weights`` in high and low; the lowest bit of ``weights`` is overwritten."""
        bits = weights.view(torch.int32)
        self.low.copy_(bits)  # conversion to int16 keeps the low bits
        bits.bitwise_or_(1)  # breaks ties: low bits 0x8000 must never round down
        self.high.copy_(weights)


class SplitState(NamedTuple):
    """The fp32 weights of a parameter, split into two halves, and its moments; all contiguous."""

    high: Tensor  # bf16
    low: Tensor  # int16: the fp32 weight has the bits 65536 * high + low
    first: Tensor  # AdamW's first moment; the first and second are both bf16 or both fp32
    second: Tensor


class AdamwScalars(NamedTuple):
    """The scalars of step t of AdamW; the bias corrections are 1 - beta^t."""

    scale: float  # factor by which gradients are multiplied first
    lr: float
    beta1: float
    beta2: float
    eps: float
    decay: float
    correction1: float
    correction2: float


class AdamwUpdate(Protocol):
    """An implementation of AdamW's update on fp32 weights that are stored as ``Split``."""

    def step(
        self,
        states: Sequence[SplitState],
        gradients: Sequence[Tensor | None],
        numbers: Sequence[AdamwScalars],
    ) -> None:
        """Take one AdamW step on bf16 gradients, in place; skip states without a gradient."""

    def sum_of_squares(self, gradients: Sequence[Tensor | None]) -> float | Tensor:
        """Return the sum of the squares of bf16 gradients; None counts as zeros."""


def round_to_bf16(weights: Tensor, out: Tensor) -> Tensor:
    """Write ``weights`` to ``out``, rounded to bf16 as ``Split`` does, and return ``out``.

    With this rounding, a frozen copy of a model has the same bf16 weights as a trained copy. The
    device of ``out`` holds only one chunk of the fp32 weights at a time.
    """
    parts = (torch.split(each, CHUNK) for each in (out.view(-1), weights.detach().reshape(-1)))
    for part, source in zip(*parts, strict=True):
        exact = source.to(out.device, torch.float32, copy=True)
        exact.view(torch.int32).bitwise_or_(1)  # ties: see Split.split
        part.copy_(exact)
    return out


def fp32_weights(shard: Tensor | Split) -> Tensor:
    """Return the fp32 weights of ``shard``: a view if it is fp32, otherwise a copy."""
    if isinstance(shard, Split):
        weights = torch.empty_like(shard.high, dtype=torch.float32)
        return shard.join(weights, torch.empty_like(weights))
    return shard.detach().float()


class Masters(NamedTuple):
    """This rank's shards of the fp32 weights, and a function that copies them to the model."""

    shards: Sequence[Tensor | Split]
    publish: Callable[[], None]


def find_deepspeed_masters(engine: Any, *, stage: int) -> Masters:
    """Return this rank's fp32 master weights in a DeepSpeed engine that trains.

    At ZeRO stage 0 the model's parameters are the master weights; from stage 1 on a rank has flat
    shards.
    """
    optimizer = engine.optimizer
    if stage == 0:
        trained = [each for each in engine.module.parameters() if each.requires_grad]
        return Masters(trained, lambda: None)
    if stage == SHARDED_WEIGHTS:
        flat = optimizer.fp32_partitioned_groups_flat
        return Masters(flat, lambda: _copy_sharded_to_model(optimizer))
    return Masters(
        optimizer.single_partition_of_fp32_groups, lambda: _copy_flat_to_model(optimizer)
    )


def _copy_flat_to_model(optimizer: Any) -> None:
    """Copy the masters to the model as DeepSpeed 0.19.8 does after a step of stages 1 and 2.

    DeepSpeed's Hybrid Engine moves some weights of the model out of the flat buffer;
    ``_update_model_bit16_weights`` puts them back.
    """
    optimizer.update_lp_params()
    for group in range(len(optimizer.bit16_groups)):
        optimizer._update_model_bit16_weights(group)


def _copy_sharded_to_model(optimizer: Any) -> None:
    """Copy the masters to the model as DeepSpeed 0.19.8 does after a step of stage 3."""
    for group in range(len(optimizer.fp32_partitioned_groups_flat)):
        optimizer._reassign_or_swap_out_partitioned_parameters(group)
    if optimizer.persistent_parameters:
        optimizer.persistent_parameters[0].all_gather(optimizer.persistent_parameters)


def build_average_kernel(shards: Sequence[Tensor | Split]) -> AverageKernel | None:
    """Return the kernel that updates moving averages of split weights; None if there is none."""
    splits = [shard for shard in shards if isinstance(shard, Split)]
    if not splits:
        return None
    device, sizes = splits[0].high.device, [split.high.numel() for split in splits]
    return kernels_for(device.type).average_kernel(sizes, device)
