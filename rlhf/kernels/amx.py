"""Kernels for decode steps on a CPU with AMX, compiled once on the machine that runs them.

Shapes: T = tokens, R = rows and L = columns of a layer's KV cache, Q = query heads, K = key/value
heads, D = head size, I = inputs, O = outputs of a linear layer.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from rlhf.kernels.compiling import compiled

TILE, DEPTH, CHUNK = 16, 32, 64  # rows, inputs and outputs of one product
ACTIVATIONS = ["none", "relu", "gelu", "gelu_tanh", "silu"]  # in the order of the enum in amx.c
ALONE, PLUS, TIMES = range(3)

_Pointer, _Size, _Int = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int


class _Linear(ctypes.Structure):
    _fields_ = (
        *((name, _Pointer) for name in ("x", "packed", "bias", "other")),
        *((name, _Size) for name in ("rows", "inputs", "outputs")),
        *((name, _Int) for name in ("activation", "combine")),
        ("y", _Pointer),
    )


class _AttentionCall(ctypes.Structure):
    _fields_ = (
        *((name, _Pointer) for name in ("query", "key", "value")),
        *(
            (f"{name}_{part}", _Size)
            for name in ("query", "key", "value")
            for part in ("token", "head")
        ),
        *((name, _Pointer) for name in ("keys", "values", "rows", "positions")),
        *((name, _Size) for name in ("tokens", "heads", "kv_heads", "capacity", "size")),
        ("scale", ctypes.c_float),
        ("mixed", _Pointer),
    )


def kernels() -> Any | None:
    """Return the compiled kernels, or None if this CPU has no AMX or they cannot be compiled."""
    return compiled("amx")


class AmxProjection:
    """A linear layer with activation, on a copy of its weights in the order that AMX reads."""

    def __init__(self, weight_OI: Tensor, bias_O: Tensor | None, activation: str) -> None:
        library: Any = kernels()
        self._library = library
        outputs, inputs = weight_OI.shape
        weight_OI = weight_OI.contiguous()
        chunks = -(-outputs // CHUNK)
        self._packed = torch.empty(chunks * CHUNK * inputs, dtype=torch.bfloat16)
        self._library.amx_pack(
            _Pointer(weight_OI.data_ptr()),
            _Size(outputs),
            _Size(inputs),
            _Pointer(self._packed.data_ptr()),
        )
        self._bias_O = bias_O
        self._call = _Linear(
            packed=self._packed.data_ptr(),
            bias=None if bias_O is None else bias_O.data_ptr(),
            inputs=inputs,
            outputs=outputs,
            activation=ACTIVATIONS.index(activation),
        )

    def __call__(self, x: Tensor) -> Tensor:
        """Return the projection (..., O) of ``x`` (..., I)."""
        return self._run(x, None, ALONE)

    def plus(self, x: Tensor, residual: Tensor) -> Tensor:
        """Return the projection of ``x`` plus ``residual`` (..., O)."""
        return self._run(x, residual, PLUS)

    def times(self, x: Tensor, factor: Tensor) -> Tensor:
        """Return the projection of ``x`` times ``factor`` (..., O)."""
        return self._run(x, factor, TIMES)

    def _run(self, x: Tensor, other: Tensor | None, combine: int) -> Tensor:
        call = self._call
        rows = x.numel() // call.inputs
        y = x.new_empty((*x.shape[:-1], call.outputs))
        x = x.contiguous()
        other = None if other is None else other.contiguous()
        call.x, call.rows, call.y, call.combine = x.data_ptr(), rows, y.data_ptr(), combine
        call.other = None if other is None else other.data_ptr()
        self._library.amx_linear(ctypes.byref(call))
        return y


def attend(
    memory_2RKLD: Tensor, heads: Sequence[Tensor], *, rows_T: Tensor, positions_T: Tensor
) -> Tensor:
    """Return causal attention (T, Q, D): each token attends to its own row, up to its position.

    ``heads`` are queries (T, Q, D), keys and values (T, K, D); the keys and values of all tokens
    are stored in the layer's KV cache first.
    """
    query, key, _ = heads = [x if x.stride(-1) == 1 else x.contiguous() for x in heads]
    tokens, num_heads, size = query.shape
    mixed = query.new_empty(query.shape)
    keys, values = memory_2RKLD.unbind()
    call = _AttentionCall(
        *(x.data_ptr() for x in heads),
        *(x.stride(dim) for x in heads for dim in (0, 1)),
        *(x.data_ptr() for x in (keys, values, rows_T, positions_T)),
        *(tokens, num_heads, key.shape[1], keys.shape[2], size),
        size**-0.5,
        mixed.data_ptr(),
    )
    library: Any = kernels()
    library.amx_attend(ctypes.byref(call))
    return mixed
