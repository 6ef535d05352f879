"""The kernels for CPUs, in C; a function returns None if torch computes instead."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rlhf.config.choices import Dtype
from rlhf.kernels.cpu.adamw import AdamwKernel, load_adamw_kernel
from rlhf.kernels.cpu.compiling import compile_kernel, describe_kernels
from rlhf.kernels.cpu.logprobs import CpuSoftmax, LogprobKernel


def summarize_kernels(dtype: Dtype) -> str | None:
    """Return one line that names the kernels; None for fp16, which has no kernels."""
    if dtype not in {Dtype.bf16, Dtype.fp32}:
        return None
    return describe_kernels(half=dtype is Dtype.bf16)


def adamw_kernel(
    _sizes: Sequence[int], _device: torch.device, _moments: torch.dtype
) -> AdamwKernel | None:
    """Return the kernel of the AdamW update, or None if it cannot be compiled."""
    return load_adamw_kernel()


def logprobs_kernel(logits: Tensor) -> LogprobKernel | None:
    """Return the kernel that computes log-probs from ``logits``, or None if it cannot run."""
    if not logits.is_cpu or logits.dtype not in {torch.bfloat16, torch.float32}:
        return None
    library = compile_kernel("logprobs", half=logits.dtype is torch.bfloat16)
    return None if library is None else LogprobKernel(library, logits.dtype)


draw_kernel = logprobs_kernel  # the same kernel samples too


def softmax_kernel(scores: Tensor) -> CpuSoftmax | None:
    """Return the kernel that computes the softmax of ``scores``, or None if it cannot run."""
    if scores.dtype not in (torch.bfloat16, torch.float32):
        return None
    library = compile_kernel("softmax", half=scores.dtype is torch.bfloat16)
    return None if library is None else CpuSoftmax(library)
