"""The kernels for GPUs, in Triton; a function returns None if there is no kernel.

Triton comes with torch's CUDA wheels. Unlike torch's own operations, it needs a C compiler,
Python's headers, a cache folder and a driver; what it raises depends on which one is missing.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rlhf.kernels.gpu.adamw_gpu import ParameterTable
from rlhf.kernels.gpu.attention_gpu import GpuAttention
from rlhf.kernels.gpu.logprobs_gpu import GpuLogprobKernel

DTYPES = {torch.bfloat16, torch.float16, torch.float32}


def adamw_kernel(
    sizes: Sequence[int], device: torch.device, _moments: torch.dtype
) -> ParameterTable:
    """Return the AdamW kernel for parameters of these ``sizes``."""
    return average_kernel(sizes, device)


def average_kernel(sizes: Sequence[int], device: torch.device) -> ParameterTable:
    """Return the kernel for moving averages of parameters of these ``sizes``."""
    from rlhf.kernels.gpu import adamw_triton

    return ParameterTable(adamw_triton, sizes, device)


def logprobs_kernel(logits: Tensor) -> GpuLogprobKernel | None:
    """Return the kernel that computes log-probs from ``logits``, or None for other dtypes."""
    if logits.dtype not in DTYPES:
        return None
    from rlhf.kernels.gpu import logprobs_triton

    return GpuLogprobKernel(logprobs_triton)


def attention_kernel(dtype: torch.dtype) -> GpuAttention | None:
    """Return the kernel for attention of one new token per row over a KV cache, or None."""
    if dtype not in DTYPES:
        return None
    from rlhf.kernels.gpu import attention_triton

    return GpuAttention(attention_triton)
