"""The product of an output layer with fp32 results, also for 16-bit inputs.

Products of 16-bit matrices are summed in fp32. If a logit near 20 is rounded to bf16, it changes by
up to 0.06, in training by another amount than in sampling. MiniMax-M1 found that this causes most
of the mismatch between their log-probabilities (https://arxiv.org/abs/2506.13585).

Shapes: N = tokens, H = hidden size, V = vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rlhf.kernels.cpu.cpu_layers import apply_linear


def fp32_logits(
    hidden_NH: Tensor, weight_VH: Tensor, bias_V: Tensor | None, *, out: Tensor | None = None
) -> Tensor:
    """Return the fp32 logits W h + b (N, V) of ``hidden_NH``; call this only where autograd is off.

    A CPU first converts 16-bit matrices to fp32, so it takes several times as long. ``out`` is for
    GPUs only.
    """
    if hidden_NH.device.type == "cpu":
        return apply_linear(
            hidden_NH.float(), weight_VH.float(), None if bias_V is None else bias_V.float()
        )
    logits_NV = torch.mm(hidden_NH, weight_VH.T, out_dtype=torch.float32, out=out)
    return logits_NV if bias_V is None else logits_NV.add_(bias_V)
