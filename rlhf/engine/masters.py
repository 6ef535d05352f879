"""Masters: the fp32 weights that an optimizer updates, whole or sharded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rlhf.config.roles import SHARDED_WEIGHTS
from rlhf.kernels import kernels_for
from rlhf.kernels.interfaces import AverageKernel
from rlhf.kernels.torch_adamw import Split

CHUNK = 2**24  # elements copied from the host to the GPU, or back, at once


def round_to_bf16(weights: Tensor, out: Tensor) -> Tensor:
    """Write ``weights`` to ``out``, rounded to bf16 as ``Split`` does, and return ``out``.

    A frozen copy of a model then has the same bf16 weights as a trained copy before its first step.
    The device of ``out`` holds only one chunk of the fp32 weights at a time.
    """
    parts = (torch.split(each, CHUNK) for each in (out.view(-1), weights.detach().reshape(-1)))
    for part, source in zip(*parts, strict=True):
        exact = source.to(out.device, torch.float32, copy=True)
        exact.view(torch.int32).bitwise_or_(1)  # ties: see Split.split
        part.copy_(exact)
    return out


class Masters(NamedTuple):
    """This rank's shards of the fp32 weights, and a function that copies them to the model."""

    shards: Sequence[Tensor | Split]
    publish: Callable[[], None]


def find_deepspeed_masters(engine: Any, *, stage: int) -> Masters:
    """Return this rank's fp32 master weights in a DeepSpeed engine that trains.

    At ZeRO stage 0 they are the trained parameters; at stages 1 to 3, this rank's flat shards.
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
