"""Softmax of attention scores on a CPU, bf16 or fp32: torch is slow on short rows.

Shapes: ... = any leading dimensions, S = scores of a row.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

from rlhf.kernels.compiling import compile_kernel


def softmax_(scores: Tensor) -> Tensor:
    """Overwrite contiguous scores (..., S) with their softmax over S, and return them."""
    library = _library_for(scores)
    if library is None:
        return torch.softmax(scores, dim=-1, out=scores)
    library.softmax_rows(ctypes.c_void_p(scores.data_ptr()), *_sizes(scores))
    return scores


def softmax_gradient_(slopes: Tensor, shares: Tensor, *, scale: float) -> Tensor:
    """Overwrite ``slopes`` with scale times the gradient of the scores (..., S); return it.

    ``slopes`` is first the gradient of ``shares``, which are the softmax of the scores.
    """
    library = _library_for(slopes)
    if library is None:
        found = torch._softmax_backward_data(slopes, shares, -1, shares.dtype)
        return slopes.copy_(found).mul_(scale)
    pointers = (ctypes.c_void_p(x.data_ptr()) for x in (slopes, shares))
    library.softmax_slopes(*pointers, *_sizes(slopes), ctypes.c_float(scale))
    return slopes


def _library_for(x: Tensor) -> Any | None:
    assert x.is_contiguous()
    if not x.is_cpu or x.dtype not in (torch.bfloat16, torch.float32):
        return None
    if torch.compiler.is_compiling():  # torch.compile fuses torch's own softmax
        return None
    return compile_kernel("softmax", half=x.dtype is torch.bfloat16)


def _sizes(x: Tensor) -> tuple[ctypes.c_int64, ctypes.c_int64]:
    return ctypes.c_int64(x.numel() // x.shape[-1]), ctypes.c_int64(x.shape[-1])
