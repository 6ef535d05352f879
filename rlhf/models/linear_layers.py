"""Products of fp32 matrices by oneDNN, on CPUs where MKL, which torch calls, is slower.

Shapes: ... = any leading dimensions, T = all leading dimensions as one, I = inputs, O = outputs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from rlhf.base.cpu import Isa, has_slow_mkl, onednn_isa

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class OnednnLinear(nn.Linear):
    """A linear layer whose forward and backward passes multiply by ``multiply``."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the projection (..., O) of ``x`` (..., I)."""
        if not _is_faster_with_onednn(x, self.weight):
            return functional.linear(x, self.weight, self.bias)
        y: Tensor = _LinearByOnednn.apply(x, self.weight, self.bias)  # type: ignore[no-untyped-call]
        return y


def use_onednn_products(model: PreTrainedModel) -> None:
    """Let ``model`` multiply by oneDNN where it is faster, except in the output layer."""
    if not has_slow_mkl():
        return
    output = model.get_output_embeddings()
    for layer in model.modules():
        if type(layer) is nn.Linear and layer is not output:
            layer.__class__ = OnednnLinear


def multiply(x: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """Return x W^T + b by the faster library; autograd does not record oneDNN's products."""
    if not _is_faster_with_onednn(x, weight_OI):
        return functional.linear(x, weight_OI, bias_O)
    y: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight_OI, bias_O, "none", [], "")
    return y


def _is_faster_with_onednn(x: Tensor, weight_OI: Tensor) -> bool:
    if torch.compiler.is_compiling():
        return False
    is_fp32 = x.dtype is weight_OI.dtype is torch.float32 and not torch.is_autocast_enabled("cpu")
    return is_fp32 and x.is_cpu and x.numel() > 0 and has_slow_mkl()


class _LinearByOnednn(torch.autograd.Function):
    """The autograd function of ``OnednnLinear``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
        """Return x W^T + b."""
        ctx.save_for_backward(x, weight_OI)
        return multiply(x, weight_OI, bias_O)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of input, weight and bias."""
        x, weight_OI = ctx.saved_tensors
        wants_x, wants_weight, wants_bias = ctx.needs_input_grad
        gradient_TO = gradient.reshape(-1, gradient.shape[-1])
        of_x = multiply(gradient, weight_OI.T.contiguous()) if wants_x else None
        x_TI = x.reshape(-1, x.shape[-1])
        of_weight = _weight_gradient(gradient_TO, x_TI) if wants_weight else None
        return of_x, of_weight, gradient_TO.sum(0) if wants_bias else None


def _weight_gradient(gradient_TO: Tensor, x_TI: Tensor) -> Tensor:
    """Return the gradient of a weight (O, I); with AVX2, MKL multiplies it as fast as oneDNN."""
    if onednn_isa() > Isa.avx2:
        return multiply(gradient_TO.T.contiguous(), x_TI.T.contiguous())
    return gradient_TO.T @ x_TI
