"""Layers that are faster on a CPU: attention by matrix products, and linear layers by oneDNN.

The backward pass of attention by matrix products is much faster than the backward pass of torch's
fused attention. On some CPUs oneDNN multiplies fp32 matrices faster than MKL, which torch calls.

Shapes: B = sequences, N = query heads, S = tokens, D = head size, M = B * N; ... = any leading
dimensions, T = all leading dimensions as one, I = inputs, O = outputs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from rlhf.base.cpu import Isa, has_slow_mkl, onednn_isa
from rlhf.kernels import kernel_checks, kernels_for
from rlhf.kernels.interfaces import SoftmaxKernel

if TYPE_CHECKING:
    from transformers import PreTrainedModel

MATMUL = "matmul"  # name under which ``matmul_attention`` is registered in transformers
LONGEST = 512  # tokens; for longer sequences torch's SDPA is faster than S x S scores
# The backward pass recomputes attention weights ("shares") if tokens > KEPT_TOKENS * head size.
# Shares for fewer tokens are stored, because they take no more memory than q, k and v.
KEPT_TOKENS = 3


def use_matmul_attention(model: PreTrainedModel) -> None:
    """Make ``model`` use ``matmul_attention``, which calls torch's SDPA where SDPA is faster.

    A model that does not use transformers' attention interface keeps its own attention.
    """
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

    if model._supports_attention_backend and model._supports_sdpa:
        AttentionInterface.register(MATMUL, matmul_attention)
        AttentionMaskInterface.register(MATMUL, sdpa_mask)
        model.set_attn_implementation(MATMUL)


def attention_for_build(name: str | None) -> str | None:
    """Return the attention to build a model with; None for MATMUL, which is set afterwards."""
    return None if name == MATMUL else name


def matmul_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Compute attention for transformers' attention interface; return (B, S, N, D).

    Matrix products compute causal attention without dropout on a CPU, over whole sequences of up
    to ``LONGEST`` tokens; SDPA computes all other attention. ``query`` is (B, N, S, D); ``key`` and
    ``value`` may have fewer heads.
    """
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    scaling = options.get("scaling")
    if not _should_use_matmul(module, query, key, value, options):
        result: tuple[Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, **options
        )
        return result
    repeats = query.shape[1] // key.shape[1]
    if repeats > 1:
        key, value = (x.repeat_interleave(repeats, dim=1) for x in (key, value))
    dtype = value.dtype  # under autocast, rotary embeddings may return query and key in fp32
    with torch.autocast(query.device.type, enabled=False):
        mixed_BNSD: Tensor = _MatmulAttention.apply(  # type: ignore[no-untyped-call]
            query.to(dtype),
            key.to(dtype),
            value,
            _build_score_bias(attention_mask, query.shape, dtype),
            query.shape[-1] ** -0.5 if scaling is None else scaling,
        )
    return mixed_BNSD.transpose(1, 2).contiguous(), None


def _should_use_matmul(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, options: dict[str, Any]
) -> bool:
    """Return True if matrix products can compute this attention, and are faster than SDPA."""
    tokens, is_causal = query.shape[2], options.get("is_causal")
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    is_whole = tokens == key.shape[2] and 1 < tokens <= LONGEST
    is_same_size = query.shape[-1] == value.shape[-1]
    changes_scores = any(options.get(name) is not None for name in ("softcap", "position_bias"))
    is_plain = is_causal and not options.get("dropout") and not changes_scores
    return query.is_cpu and is_whole and is_same_size and is_plain and not kernel_checks.are_off()


def _build_score_bias(mask: Tensor | None, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """Return the bias (M, S, S) to add to scores; if ``mask`` is None, the bias is causal.

    ``shape`` is (B, N, S, D).
    """
    batch, heads, tokens, _ = shape
    least = torch.finfo(dtype).min  # not -inf: a row without any visible token would become NaN
    if mask is None:
        bias_SS = torch.full((tokens, tokens), least, dtype=dtype).triu(diagonal=1)
        return bias_SS.expand(batch * heads, tokens, tokens)
    if mask.dtype is torch.bool:
        mask = torch.zeros(mask.shape, dtype=dtype).masked_fill(~mask, least)
    return mask.to(dtype).expand(batch, heads, tokens, tokens).reshape(-1, tokens, tokens)


class _MatmulAttention(torch.autograd.Function):
    """Attention softmax(scaling * q k^T + bias) v with a backward pass by matrix products."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, bias_MSS: Tensor, scaling: float
    ) -> Tensor:
        """Return the attention output (B, N, S, D)."""
        query_MSD, key_MSD, value_MSD = (x.flatten(0, 1) for x in (query, key, value))
        ctx.scaling = scaling
        shares_MSS = _compute_attention_weights(query_MSD, key_MSD, bias_MSS, scaling)
        tokens, width = query_MSD.shape[1:]
        ctx.keeps_shares = tokens <= KEPT_TOKENS * width
        kept_MSS = shares_MSS if ctx.keeps_shares else bias_MSS
        ctx.save_for_backward(query_MSD, key_MSD, value_MSD, kept_MSS)
        return torch.bmm(shares_MSS, value_MSD).view(query.shape)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of query, key and value."""
        query_MSD, key_MSD, value_MSD, shares_MSS = ctx.saved_tensors
        if not ctx.keeps_shares:
            shares_MSS = _compute_attention_weights(query_MSD, key_MSD, shares_MSS, ctx.scaling)
        gradient_MSD = gradient.reshape(query_MSD.shape)
        value_grad_MSD = torch.bmm(shares_MSS.transpose(1, 2), gradient_MSD)
        shares_grad_MSS = torch.bmm(gradient_MSD, value_MSD.transpose(1, 2))
        products_grad_MSS = softmax_gradient_(shares_grad_MSS, shares_MSS, scale=ctx.scaling)
        query_grad_MSD = torch.bmm(products_grad_MSS, key_MSD)
        key_grad_MSD = torch.bmm(products_grad_MSS.transpose(1, 2), query_MSD)
        parts = (query_grad_MSD, key_grad_MSD, value_grad_MSD)
        return *(part.view(gradient.shape) for part in parts), None, None


def _compute_attention_weights(
    query_MSD: Tensor, key_MSD: Tensor, bias_MSS: Tensor, scaling: float
) -> Tensor:
    """Return the attention weights softmax(scaling * q k^T + bias), (M, S, S)."""
    scores_MSS = torch.baddbmm(bias_MSS, query_MSD, key_MSD.transpose(1, 2), alpha=scaling)
    return softmax_(scores_MSS)


class OnednnLinear(nn.Linear):
    """A linear layer that multiplies matrices with oneDNN if oneDNN is faster than MKL."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the projection (..., O) of ``x`` (..., I)."""
        if not _is_faster_with_onednn(x, self.weight):
            return functional.linear(x, self.weight, self.bias)
        y: Tensor = _LinearByOnednn.apply(x, self.weight, self.bias)  # type: ignore[no-untyped-call]
        return y


def use_onednn_products(model: PreTrainedModel) -> None:
    """Make all linear layers but the output layer use oneDNN, if MKL is slow on this CPU."""
    if not has_slow_mkl():
        return
    output = model.get_output_embeddings()
    for layer in model.modules():
        if type(layer) is nn.Linear and layer is not output:
            layer.__class__ = OnednnLinear


def apply_linear(x: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """Return x W^T + b by MKL or oneDNN; autograd does not record a product by oneDNN."""
    if not _is_faster_with_onednn(x, weight_OI):
        return functional.linear(x, weight_OI, bias_O)
    y: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight_OI, bias_O, "none", [], "")
    return y


def _is_faster_with_onednn(x: Tensor, weight_OI: Tensor) -> bool:
    if torch.compiler.is_compiling() or kernel_checks.are_off():
        return False
    is_fp32 = x.dtype is weight_OI.dtype is torch.float32 and not torch.is_autocast_enabled("cpu")
    return is_fp32 and x.is_cpu and x.numel() > 0 and has_slow_mkl()


class _LinearByOnednn(torch.autograd.Function):
    """The autograd function of ``OnednnLinear``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
        """Return x W^T + b."""
        ctx.save_for_backward(x, weight_OI)
        return apply_linear(x, weight_OI, bias_O)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of input, weight and bias."""
        x, weight_OI = ctx.saved_tensors
        wants_x, wants_weight, wants_bias = ctx.needs_input_grad
        gradient_TO = gradient.reshape(-1, gradient.shape[-1])
        x_grad = apply_linear(gradient, weight_OI.T.contiguous()) if wants_x else None
        x_TI = x.reshape(-1, x.shape[-1])
        weight_grad = _compute_weight_gradient(gradient_TO, x_TI) if wants_weight else None
        return x_grad, weight_grad, gradient_TO.sum(0) if wants_bias else None


def _compute_weight_gradient(gradient_TO: Tensor, x_TI: Tensor) -> Tensor:
    """Return the gradient of a weight (O, I); oneDNN beats MKL only on CPUs with AVX-512."""
    if onednn_isa() > Isa.avx2:
        return apply_linear(gradient_TO.T.contiguous(), x_TI.T.contiguous())
    return gradient_TO.T @ x_TI


def softmax_(scores: Tensor) -> Tensor:
    """Overwrite contiguous scores (..., S) with their softmax over S, and return them."""
    kernel = _select_softmax(scores)
    return torch.softmax(scores, dim=-1, out=scores) if kernel is None else kernel.softmax_(scores)


def softmax_gradient_(slopes: Tensor, shares: Tensor, *, scale: float) -> Tensor:
    """Overwrite ``slopes`` by ``scale`` times the gradient of softmax's inputs; return ``slopes``.

    ``slopes`` (..., S) is the gradient of ``shares``, which are the softmax of the inputs over S.
    """
    kernel = _select_softmax(slopes)
    if kernel is None:
        gradient = torch._softmax_backward_data(slopes, shares, -1, shares.dtype)
        return slopes.copy_(gradient).mul_(scale)
    return kernel.gradient_(slopes, shares, scale=scale)


def _select_softmax(x: Tensor) -> SoftmaxKernel | None:
    assert x.is_contiguous()
    if not x.is_cpu or torch.compiler.is_compiling():  # torch.compile fuses torch's own softmax
        return None
    return kernels_for("cpu").softmax_kernel(x)
