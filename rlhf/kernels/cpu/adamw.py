"""AdamW on fp32 weights stored as two halves, in one pass over weights, moments and gradient."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from rlhf.kernels.cpu.compiling import compile_kernel
from rlhf.kernels.torch_adamw import AdamwScalars, SplitState

_Pointer, _Size, _Float = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float


class _Call(ctypes.Structure):
    _fields_ = (
        *((name, _Pointer) for name in ("high", "low", "first", "second", "gradient")),
        ("size", _Size),
        ("half_moments", ctypes.c_int),
        *((name, _Float) for name in AdamwScalars._fields),
    )


class AdamwKernel:
    """The AdamW update in C: the compiled functions of adamw.c."""

    def __init__(self, library: Any) -> None:
        self._library = library
        library.adamw_squares.restype = ctypes.c_double

    def step(
        self,
        states: Sequence[SplitState],
        gradients: Sequence[Tensor | None],
        scalars: Sequence[AdamwScalars],
    ) -> None:
        """Update ``states`` in place by an AdamW step; skip a state whose bf16 gradient is None."""
        for state, gradient, its_scalars in zip(states, gradients, scalars, strict=True):
            if gradient is None:
                continue
            contiguous = gradient.contiguous()
            call = _Call(
                *(tensor.data_ptr() for tensor in (*state, contiguous)),
                contiguous.numel(),
                state.first.dtype is torch.bfloat16,
                *its_scalars,
            )
            self._library.adamw_step(ctypes.byref(call))

    def sum_of_squares(self, gradients: Sequence[Tensor | None]) -> float:
        """Return the sum of the squares of bf16 gradients; None counts as zeros."""
        total = 0.0
        for gradient in gradients:
            if gradient is not None:
                contiguous = gradient.contiguous()
                pointer, size = _Pointer(contiguous.data_ptr()), _Size(contiguous.numel())
                total += self._library.adamw_squares(pointer, size)
        return total


def load_adamw_kernel() -> AdamwKernel | None:
    """Return the AdamW kernel for CPUs, or None if it cannot be compiled."""
    library = compile_kernel("adamw")
    return None if library is None else AdamwKernel(library)
