"""The places of a model's weights in memory."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

ALIGNMENT = 16  # bytes that GPUs load at a time


def homes(
    parameters: Sequence[nn.Parameter], dtype: torch.dtype, device: torch.device
) -> dict[nn.Parameter, Tensor]:
    """Return the tensor in which each fp32 parameter will be stored on ``device``, as ``dtype``.

    On a GPU all are parts of one allocation, matrices first and then vectors, each in the order of
    the modules, as in DeepSpeed's flat buffers. Linear layers that follow one another, such as
    queries, keys and values, can then be computed as one (``rlhf.rollout.decoders.layers``).
    """
    if device.type == "cpu":
        is_same = dtype is torch.float32
        return {p: p.data if is_same else torch.empty(p.shape, dtype=dtype) for p in parameters}
    unit = ALIGNMENT // dtype.itemsize
    order = sorted(parameters, key=lambda parameter: parameter.dim() == 1)  # stable
    sizes = [math.ceil(parameter.numel() / unit) * unit for parameter in order]
    parts = torch.split(torch.empty(sum(sizes), dtype=dtype, device=device), sizes)
    return {p: part[: p.numel()].view(p.shape) for p, part in zip(order, parts, strict=True)}
