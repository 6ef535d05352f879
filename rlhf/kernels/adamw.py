"""AdamW on split fp32 weights, in one pass over a parameter's weights, moments and gradient."""

from __future__ import annotations

import ctypes
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rlhf.kernels.compiling import compiled

_Pointer, _Size, _Float = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float


class SplitState(NamedTuple):
    """A parameter's fp32 weights in two halves, and its moments; all contiguous, on the CPU."""

    high: Tensor  # bf16
    low: Tensor  # int16: the fp32 weight has the bits 65536 * high + low
    first: Tensor  # AdamW's moments, both bf16 or both fp32
    second: Tensor


class AdamwScalars(NamedTuple):
    """The scalars of step t of AdamW; the corrections are 1 - beta^t."""

    scale: float  # gradients are multiplied by it
    lr: float
    beta1: float
    beta2: float
    eps: float
    decay: float
    correction1: float
    correction2: float


class _Call(ctypes.Structure):
    _fields_ = (
        *((name, _Pointer) for name in ("high", "low", "first", "second", "gradient")),
        ("size", _Size),
        ("half_moments", ctypes.c_int),
        *((name, _Float) for name in AdamwScalars._fields),
    )


class AdamwKernel:
    """The compiled functions of adamw.c."""

    def __init__(self, library: Any) -> None:
        self._library = library
        library.adamw_squares.restype = ctypes.c_double

    def step(self, split: SplitState, gradient: Tensor, numbers: AdamwScalars) -> None:
        """Update ``split`` in place by one AdamW step on a bf16 gradient."""
        gradient = gradient.contiguous()
        call = _Call(
            *(tensor.data_ptr() for tensor in (*split, gradient)),
            gradient.numel(),
            split.first.dtype is torch.bfloat16,
            *numbers,
        )
        self._library.adamw_step(ctypes.byref(call))

    def squares(self, gradient: Tensor) -> float:
        """Return the sum of the squares of a bf16 gradient."""
        gradient = gradient.contiguous()
        total = self._library.adamw_squares(_Pointer(gradient.data_ptr()), _Size(gradient.numel()))
        return float(total)


def adamw_kernel() -> AdamwKernel | None:
    """Return the kernel, or None if it cannot be compiled."""
    library = compiled("adamw")
    return None if library is None else AdamwKernel(library)
