"""Build a program of a decoder's operations, which compiled code runs on a CPU in one call.

Shapes: T = tokens, R = rows and L = columns of a layer's KV cache, K = key/value heads, D = head
size, I = inputs and O = outputs of a linear layer.
"""

from __future__ import annotations

import ctypes
from enum import IntEnum
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from rlhf.kernels.cpu.compiling import compile_kernel

LANES = 16  # numbers in the widest vector; a kernel may read as many past a table's end


class CompiledActivation(IntEnum):
    """The activation functions of decode.c, by their numbers there."""

    none = 0
    relu = 1
    gelu = 2
    gelu_tanh = 3
    silu = 4


class Combine(IntEnum):
    """The operation between a linear layer's result and another buffer: none, + or *."""

    alone = 0
    plus = 1
    times = 2


class HeadsAt(NamedTuple):
    """The place of queries, keys or values in a buffer: ``heads`` vectors per token."""

    buffer: int
    first: int  # index of the first vector within a token's row of the buffer
    token: int  # stride from one token to the next: the width of the buffer
    head: int  # stride from one vector to the next
    heads: int


class _Kind(IntEnum):
    linear = 0
    norm = 1
    rotate = 2
    store_kv = 3
    attend = 4


_Pointer, _Size = ctypes.c_void_p, ctypes.c_int64


def _struct_fields(field_type: Any, names: str) -> list[tuple[str, Any]]:
    return [(name, field_type) for name in names.split()]


class _Heads(ctypes.Structure):
    _fields_ = _struct_fields(_Size, "buffer first token head heads")


class _Linear(ctypes.Structure):
    _fields_ = [
        *_struct_fields(_Pointer, "packed bias next"),
        *_struct_fields(_Size, "x y other inputs outputs activation combine keeps_fp32"),
    ]


class _Norm(ctypes.Structure):
    _fields_ = [
        *_struct_fields(_Pointer, "weight bias"),
        *_struct_fields(_Size, "x y size is_rms"),
        ("epsilon", ctypes.c_float),
    ]


class _Rotary(ctypes.Structure):
    _fields_ = [("heads", _Heads), *_struct_fields(_Pointer, "norm cos sin"), ("rotated", _Size)]


class _Attention(ctypes.Structure):
    _fields_ = [
        *_struct_fields(_Heads, "query key value"),
        *_struct_fields(_Pointer, "keys values"),
        *_struct_fields(_Size, "capacity size"),
        ("scale", ctypes.c_float),
        ("mixed", _Size),
    ]


class _Step(ctypes.Structure):
    _fields_ = [("kind", _Size), ("arguments", _Pointer)]


class _Pass(ctypes.Structure):
    _fields_ = [
        ("buffers", _Pointer),
        ("tokens", _Size),
        *_struct_fields(_Pointer, "rows positions"),
    ]


class Linear(NamedTuple):
    """The weight and bias of a linear layer, as ``DecodeProgram.add_linear`` takes them."""

    weight_OI: Tensor
    bias_O: Tensor | None


class Norm(NamedTuple):
    """The parameters of a LayerNorm or RMS norm, as ``DecodeProgram.add_norm`` takes them."""

    weight: Tensor | None
    bias: Tensor | None
    epsilon: float
    is_rms: bool
    size: int


def load_decode_library(dtype: torch.dtype) -> Any | None:
    """Return the compiled functions of decode.c for ``dtype``, or None if they cannot run here."""
    if dtype not in {torch.bfloat16, torch.float32}:
        return None
    return compile_kernel("decode", half=dtype is torch.bfloat16)


class DecodeProgram:
    """A forward pass as a list of steps, which compiled code runs in one call.

    Steps read and write buffers; a buffer holds one row of numbers per token. All threads finish a
    step before the next step begins.
    """

    def __init__(self, library: Any, dtype: torch.dtype) -> None:
        self._library = library
        self._dtype = dtype
        self._steps: list[_Step] = []
        self._array: Any = None  # the steps as a C array, which the first run builds
        self._last_linear: _Linear | None = None
        self._scratch: list[Tensor] = []
        self._kept: list[Any] = []  # references to the objects that the steps point to

    def add_buffer(self, width: int, dtype: torch.dtype | None = None) -> int:
        """Add a buffer: ``width`` numbers of ``dtype`` (None: the program's); return its index."""
        self._scratch.append(torch.empty(0, width, dtype=dtype or self._dtype))
        return len(self._scratch) - 1

    def add_linear(
        self,
        layer: Linear,
        *,
        x: int,
        y: int,
        activation: CompiledActivation = CompiledActivation.none,
        combine: Combine = Combine.alone,
        other: int = 0,
    ) -> None:
        """Add a step y = combine(activation(x W^T + b), other).

        ``x``, ``y`` and ``other`` are indices of buffers; ``other`` may be ``y``. The weight is
        copied into the order in which the step reads it. bf16 requires an even number of inputs.
        A buffer ``y`` of fp32 numbers gets the results unrounded.
        """
        outputs, inputs = layer.weight_OI.shape
        sizes = (_Size(outputs), _Size(inputs))
        self._library.decode_packed_size.restype = _Size
        packed = torch.empty(self._library.decode_packed_size(*sizes), dtype=self._dtype)
        weight_OI = self._as_contiguous(layer.weight_OI)
        pointers = (_Pointer(each.data_ptr()) for each in (weight_OI, packed))
        self._library.decode_pack(next(pointers), *sizes, next(pointers))
        bias = None if layer.bias_O is None else self._address_of(self._as_contiguous(layer.bias_O))
        sizes_and_choices = (x, y, other, inputs, outputs, activation, combine)
        keeps_fp32 = self._scratch[y].dtype is torch.float32
        step = _Linear(self._address_of(packed), bias, None, *sizes_and_choices, keeps_fp32)
        if self._last_linear is not None:
            self._last_linear.next = ctypes.addressof(step)
        self._last_linear = step
        self._add_step(_Kind.linear, step)

    def add_norm(self, norm: Norm, *, x: int, y: int) -> None:
        """Add a step y = norm(x) on buffers ``x`` and ``y``; ``y`` may be ``x``."""
        self._add_step(_Kind.norm, self._build_norm_struct(norm, x, y))

    def add_rotary(
        self, heads: HeadsAt, norm: Norm | None, rotary: tuple[Tensor, Tensor] | None
    ) -> None:
        """Add a step that applies ``norm`` to each head, then ``rotary``; either may be None.

        ``rotary`` holds the tables cos and sin (positions, rotated), computed in fp32; the first
        half of each row of sin is negated. Only a head's first ``rotated`` numbers are rotated.
        """
        kept = None if norm is None else self._keep_alive(self._build_norm_struct(norm, 0, 0))
        step = _Rotary(heads=_Heads(*heads), norm=None if kept is None else ctypes.addressof(kept))
        if rotary is not None:
            padded = (functional.pad(table.float().flatten(), (0, LANES)) for table in rotary)
            step.cos, step.sin = (self._address_of(table) for table in padded)
            step.rotated = rotary[0].shape[1]
        self._add_step(_Kind.rotate, step)

    def add_attention(
        self, heads: tuple[HeadsAt, HeadsAt, HeadsAt], kv_cache_2RKLD: Tensor, *, mixed: int
    ) -> None:
        """Add steps that write causal attention over a layer's KV cache to the buffer ``mixed``.

        ``heads`` are queries, keys and values. The first step stores the keys and values of all
        tokens in the KV cache. In the second step, each token attends to the tokens of its row up
        to its own position.
        """
        capacity, size = kv_cache_2RKLD.shape[3:]
        step = _Attention(
            *(_Heads(*each) for each in heads),
            *(self._address_of(numbers_RKLD) for numbers_RKLD in kv_cache_2RKLD.unbind()),
            *(capacity, size, size**-0.5, mixed),
        )
        self._add_step(_Kind.store_kv, step)
        self._add_step(_Kind.attend, step)

    def run(self, given: dict[int, Tensor], rows_T: Tensor, positions_T: Tensor) -> None:
        """Run all steps on T tokens, each with its row of the KV cache and its position.

        ``given`` maps the index of a buffer to the caller's contiguous tensor (T, width).
        """
        tokens = len(rows_T)
        for index, buffer in enumerate(self._scratch):
            if index not in given and len(buffer) < tokens:
                self._scratch[index] = buffer.new_empty(tokens, buffer.shape[1])
        buffers = [given.get(index, buffer) for index, buffer in enumerate(self._scratch)]
        pointers = (_Pointer * len(buffers))(*(buffer.data_ptr() for buffer in buffers))
        if self._array is None:
            self._array = (_Step * len(self._steps))(*self._steps)
        tables = (rows_T.data_ptr(), positions_T.data_ptr())
        call = _Pass(ctypes.addressof(pointers), tokens, *tables)
        self._library.decode_run(self._array, _Size(len(self._steps)), ctypes.byref(call))

    def _build_norm_struct(self, norm: Norm, x: int, y: int) -> _Norm:
        vectors = (
            None if each is None else self._address_of(self._as_contiguous(each))
            for each in (norm.weight, norm.bias)
        )
        return _Norm(*vectors, x, y, norm.size, norm.is_rms, norm.epsilon)

    def _add_step(self, kind: _Kind, arguments: Any) -> None:
        self._steps.append(_Step(kind, ctypes.addressof(self._keep_alive(arguments))))

    def _as_contiguous(self, x: Tensor) -> Tensor:
        return x.detach().to(self._dtype).contiguous()

    def _address_of(self, x: Tensor) -> int:
        return int(self._keep_alive(x).data_ptr())

    def _keep_alive(self, value: Any) -> Any:
        self._kept.append(value)
        return value
