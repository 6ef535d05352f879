"""Linear layers for a few rows at a time, with what follows them in the same pass.

Shapes: ... = any leading dimensions, I = inputs, O = outputs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from rlhf.kernels import amx

ROWS = 16  # oneDNN lays weights out for products of about this many rows


class Projection(Protocol):
    """``x W^T + b``, then an activation."""

    def __call__(self, x: Tensor) -> Tensor:
        """The projection (..., O) of ``x`` (..., I)."""

    def plus(self, x: Tensor, residual: Tensor) -> Tensor:
        """The projection plus ``residual`` (..., O)."""

    def times(self, x: Tensor, factor: Tensor) -> Tensor:
        """The projection times ``factor`` (..., O)."""


class PlainProjection:
    """On the weights as they are: no copy."""

    def __init__(self, weight_OI: Tensor, bias_O: Tensor | None, activation: str | None) -> None:
        self._weight_OI = weight_OI
        self._bias_O = bias_O
        self._activate = ACTIVATIONS[activation].function

    def __call__(self, x: Tensor) -> Tensor:
        """The projection (..., O) of ``x`` (..., I)."""
        return self._activate(functional.linear(x, self._weight_OI, self._bias_O))

    def plus(self, x: Tensor, residual: Tensor) -> Tensor:
        """The projection plus ``residual`` (..., O)."""
        return self(x).add_(residual)

    def times(self, x: Tensor, factor: Tensor) -> Tensor:
        """The projection times ``factor`` (..., O)."""
        return self(x).mul_(factor)


class PackedProjection:
    """On a copy in oneDNN's own layout, which a CPU reads about twice as fast."""

    def __init__(self, weight_OI: Tensor, bias_O: Tensor | None, activation: str | None) -> None:
        self._packed: Any = torch.ops.mkldnn._reorder_linear_weight(weight_OI.contiguous(), ROWS)
        self._bias_O = bias_O
        self._activation = ACTIVATIONS[activation]

    def __call__(self, x: Tensor) -> Tensor:
        """The projection (..., O) of ``x`` (..., I)."""
        name, variant = self._activation.onednn
        result: Tensor = torch.ops.mkldnn._linear_pointwise(
            x, self._packed, self._bias_O, name, [], variant
        )
        return result

    def plus(self, x: Tensor, residual: Tensor) -> Tensor:
        """The projection plus ``residual`` (..., O)."""
        return self._with(x, residual, "add")

    def times(self, x: Tensor, factor: Tensor) -> Tensor:
        """The projection times ``factor`` (..., O)."""
        return self._with(x, factor, "mul")

    def _with(self, x: Tensor, other: Tensor, operation: str) -> Tensor:
        result: Tensor = torch.ops.mkldnn._linear_pointwise.binary(
            x, other, self._packed, self._bias_O, operation
        )
        return result


def _gelu_tanh(x: Tensor) -> Tensor:
    return functional.gelu(x, approximate="tanh")


class Activation(NamedTuple):
    """One function under the names that its kernels know it by."""

    function: Callable[[Tensor], Tensor]
    onednn: tuple[str, str]
    amx: str


# transformers' names of activations
GELU_TANH = Activation(_gelu_tanh, ("gelu", "tanh"), "gelu_tanh")
ACTIVATIONS = {
    None: Activation(lambda x: x, ("none", ""), "none"),
    "relu": Activation(torch.relu, ("relu", ""), "relu"),
    "gelu": Activation(functional.gelu, ("gelu", "none"), "gelu"),
    "gelu_new": GELU_TANH,
    "gelu_fast": GELU_TANH,
    "gelu_pytorch_tanh": GELU_TANH,
    "silu": Activation(functional.silu, ("swish", ""), "silu"),
}


def projection(weight_OI: Tensor, bias_O: Tensor | None, activation: str | None) -> Projection:
    """The fastest there is for these weights here; all are in their precision.

    On a CPU it has a copy of the weights in the order in which they are read.
    """
    inputs = weight_OI.shape[1]
    if on_amx(weight_OI.device, weight_OI.dtype) and inputs % amx.DEPTH == 0:
        return amx.AmxProjection(weight_OI, bias_O, ACTIVATIONS[activation].amx)
    if can_pack(weight_OI.device, weight_OI.dtype):
        return PackedProjection(weight_OI, bias_O, activation)
    return PlainProjection(weight_OI, bias_O, activation)


def on_amx(device: torch.device, dtype: torch.dtype) -> bool:
    """True where the kernels of ``amx`` compute this type."""
    return device.type == "cpu" and dtype is torch.bfloat16 and amx.kernels() is not None


def can_pack(device: torch.device, dtype: torch.dtype) -> bool:
    """True where oneDNN multiplies this type on this device."""
    packs = torch._C._has_mkldnn and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
    return device.type == "cpu" and packs and dtype in (torch.float32, torch.bfloat16)
