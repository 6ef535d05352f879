"""Describe the kernels that a run on a CPU uses."""

from __future__ import annotations

from rlhf.config.choices import Dtype
from rlhf.options.cpu_kernels.compiling import describe_kernels


def describe(dtype: Dtype) -> str | None:
    """Return the line of ``describe_kernels``; None for fp16, which has no kernels."""
    if dtype not in {Dtype.bf16, Dtype.fp32}:
        return None
    return describe_kernels(half=dtype is Dtype.bf16)
