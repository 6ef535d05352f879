"""Linear layers for a few rows at a time, fused with the operation that follows.

Shapes: ... = any leading dimensions, I = inputs, O = outputs.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from rlhf.base.decoder_modules import LowRank
from rlhf.kernels.cpu import decode

ROWS = 16  # oneDNN chooses its weight layout for about this many rows


class PlainProjection:
    """A linear layer ``x W^T + b`` and an activation; it keeps the given weights without a copy."""

    def __init__(self, weight_OI: Tensor, bias_O: Tensor | None, activation: str | None) -> None:
        self._weight_OI = weight_OI
        self._bias_O = bias_O
        self._activate = ACTIVATIONS[activation].function

    def __call__(self, x: Tensor) -> Tensor:
        """Return the projection (..., O) of ``x`` (..., I)."""
        return self._activate(functional.linear(x, self._weight_OI, self._bias_O))

    def project_and_add(self, x: Tensor, residual: Tensor) -> Tensor:
        """Return the sum of the projection of ``x`` and ``residual`` (..., O)."""
        return self(x).add_(residual)

    def project_and_multiply(self, x: Tensor, factor: Tensor) -> Tensor:
        """Return the product of the projection of ``x`` and ``factor`` (..., O)."""
        return self(x).mul_(factor)


class AdaptedProjection(PlainProjection):
    """A ``Projection`` that computes an adapter separately instead of merging it into the weights.

    A merged copy of all weights would take as much memory as the model itself.
    """

    def __init__(
        self, weight_OI: Tensor, bias_O: Tensor | None, activation: str | None, adapter: LowRank
    ) -> None:
        super().__init__(weight_OI, bias_O, activation)
        self._adapter = adapter

    def __call__(self, x: Tensor) -> Tensor:
        """Return the projection (..., O) of ``x`` (..., I)."""
        a_RI, b_OR, scaling = self._adapter
        added = functional.linear(functional.linear(x, a_RI), b_OR)
        whole = functional.linear(x, self._weight_OI, self._bias_O)
        return self._activate(whole.add_(added, alpha=scaling))


class PackedProjection:
    """A ``Projection`` with weights in oneDNN's layout, which a CPU reads about twice as fast."""

    def __init__(self, weight_OI: Tensor, bias_O: Tensor | None, activation: str | None) -> None:
        self._packed: Any = torch.ops.mkldnn._reorder_linear_weight(weight_OI.contiguous(), ROWS)
        self._bias_O = bias_O
        self._activation = ACTIVATIONS[activation]

    def __call__(self, x: Tensor) -> Tensor:
        """Return the projection (..., O) of ``x`` (..., I)."""
        name, variant = self._activation.onednn
        result: Tensor = torch.ops.mkldnn._linear_pointwise(
            x, self._packed, self._bias_O, name, [], variant
        )
        return result

    def project_and_add(self, x: Tensor, residual: Tensor) -> Tensor:
        """Return ``residual`` (..., O) plus the projection of ``x``."""
        return self._linear_and_combine(x, residual, "add")

    def project_and_multiply(self, x: Tensor, factor: Tensor) -> Tensor:
        """Return ``factor`` (..., O) times the projection of ``x``."""
        return self._linear_and_combine(x, factor, "mul")

    def _linear_and_combine(self, x: Tensor, other: Tensor, operation: str) -> Tensor:
        result: Tensor = torch.ops.mkldnn._linear_pointwise.binary(
            x, other, self._packed, self._bias_O, operation
        )
        return result


Projection = PlainProjection | PackedProjection


class Activation(NamedTuple):
    """An activation function and its names in oneDNN and decode.c."""

    function: Callable[[Tensor], Tensor]
    onednn: tuple[str, str]
    compiled: decode.CompiledActivation


# The keys of ACTIVATIONS are the names of activations in transformers.
APPROXIMATE_GELU = partial(functional.gelu, approximate="tanh")
GELU_TANH = Activation(APPROXIMATE_GELU, ("gelu", "tanh"), decode.CompiledActivation.gelu_tanh)
ACTIVATIONS = {
    None: Activation(lambda x: x, ("none", ""), decode.CompiledActivation.none),
    "relu": Activation(torch.relu, ("relu", ""), decode.CompiledActivation.relu),
    "gelu": Activation(functional.gelu, ("gelu", "none"), decode.CompiledActivation.gelu),
    "gelu_new": GELU_TANH,
    "gelu_fast": GELU_TANH,
    "gelu_pytorch_tanh": GELU_TANH,
    "silu": Activation(functional.silu, ("swish", ""), decode.CompiledActivation.silu),
}


def build_fastest_projection(
    weight_OI: Tensor, bias_O: Tensor | None, activation: str | None
) -> Projection:
    """Return the fastest projection for these weights on their device, in their precision.

    With oneDNN the projection holds a copy of the weights in oneDNN's layout.
    """
    if can_pack_weights(weight_OI.device, weight_OI.dtype):
        return PackedProjection(weight_OI, bias_O, activation)
    return PlainProjection(weight_OI, bias_O, activation)


def can_pack_weights(device: torch.device, dtype: torch.dtype) -> bool:
    """Return True if oneDNN can pack weights of ``dtype`` on ``device``; bf16 needs AVX-512."""
    if device.type != "cpu" or not torch._C._has_mkldnn:
        return False
    if dtype is torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype is torch.float32 and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
