"""The kernels for GPUs, in Triton; a function returns None if torch computes instead."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from rlhf.config.choices import Dtype
from rlhf.options.gpu_kernels.adamw_gpu import ParameterTable, load_adamw_gpu_kernels
from rlhf.options.gpu_kernels.attention_gpu import GpuAttention, load_gpu_attention
from rlhf.options.gpu_kernels.logprobs_gpu import GpuLogprobKernel, load_gpu_logprob_kernel


def summarize_kernels(_dtype: Dtype) -> None:
    """Return None: a kernel that cannot run logs a warning when it is first used."""


def adamw_kernel(sizes: Sequence[int], device: torch.device) -> ParameterTable | None:
    """Return the AdamW kernel for parameters of these ``sizes``, or None if it cannot run."""
    kernels = load_adamw_gpu_kernels(device)
    return None if kernels is None else ParameterTable(kernels, sizes, device)


average_kernel = adamw_kernel  # the same table updates moving averages too


def logprobs_kernel(logits: Tensor) -> GpuLogprobKernel | None:
    """Return the kernel that computes log-probs from ``logits``, or None if it cannot run."""
    return load_gpu_logprob_kernel(logits)


def draw_kernel(_logits: Tensor) -> None:
    """Return None: on a GPU torch samples."""


def build_fused_decoder(*_: Any, **__: Any) -> None:
    """Return None: on a GPU torch decodes."""


def attention_kernel(
    device: torch.device, dtype: torch.dtype, *, group: int, size: int
) -> GpuAttention | None:
    """Return the kernel for attention of one new token per row over a KV cache, or None."""
    return load_gpu_attention(device, dtype, group=group, size=size)
