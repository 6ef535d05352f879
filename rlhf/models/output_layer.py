"""Log-probabilities of tokens from the output layer, without storing its logits.

Shapes: N = picked tokens, C = tokens of one chunk, H = hidden size, V = vocabulary, B = sequences,
S = tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from rlhf.kernels.logprobs import logprob_kernel
from rlhf.types import LogprobOptions, TokenLogprobs

CHUNK_ROWS = 512  # tokens whose logits exist at the same time
CPU_BLOCK = 2**19  # elements of a softmax that fit into a core's own cache
LEAST_LOG = -1e4  # replaces log 0, so that 0 log 0 = 0; its exp is 0


DEFAULT_OPTIONS = LogprobOptions()


def fused_logprobs(
    hidden_NH: Tensor,
    weight_VH: Tensor,
    bias_V: Tensor | None,
    ids_N: Tensor,
    options: LogprobOptions = DEFAULT_OPTIONS,
    *,
    chunk: int = CHUNK_ROWS,
) -> TokenLogprobs:
    """Return the log-probability of each token under softmax((W hidden + b) / temperature).

    Logits are computed ``chunk`` rows at a time, and again in the backward pass, so that (N, V)
    never exists. Matrices are multiplied in autocast's dtype, without autocast in the dtype of
    ``hidden_NH``; the softmax is computed in fp32.
    """
    device = hidden_NH.device.type
    is_cast = torch.is_autocast_enabled(device)
    dtype = torch.get_autocast_dtype(device) if is_cast else hidden_NH.dtype
    with torch.autocast(device, enabled=False):
        logprobs_N, entropy_N = _FusedLogprobs.apply(  # type: ignore[no-untyped-call]
            hidden_NH.to(dtype),
            weight_VH.to(dtype),
            None if bias_V is None else bias_V.to(dtype),
            ids_N,
            options,
            chunk,
        )
    return TokenLogprobs(logprobs_N.float(), entropy_N.float() if options.with_entropy else None)


def token_logprobs(
    logits_NV: Tensor, ids_N: Tensor, options: LogprobOptions = DEFAULT_OPTIONS
) -> TokenLogprobs:
    """Return log-probabilities from logits, for models that change the output layer's logits."""
    logits_NV = logits_NV.float() / options.temperature
    log_softmax_NV = functional.log_softmax(logits_NV, dim=-1)
    logprobs_N = log_softmax_NV.gather(-1, ids_N[..., None]).squeeze(-1)
    if not options.with_entropy:
        return TokenLogprobs(logprobs_N, None)
    if not options.entropy_gradient:
        log_softmax_NV = log_softmax_NV.detach()
    # entr(p) = -p log p has an infinite slope at p = 0; clamped to tiny, p still adds nothing.
    probs_NV = log_softmax_NV.exp().clamp(min=torch.finfo(torch.float32).tiny)
    return TokenLogprobs(logprobs_N, torch.special.entr(probs_NV).sum(dim=-1))


class _FusedLogprobs(torch.autograd.Function):
    """``fused_logprobs`` of tensors of one dtype; no tensor of shape (N, V) is stored."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_NH: Tensor,
        weight_VH: Tensor,
        bias_V: Tensor | None,
        ids_N: Tensor,
        options: LogprobOptions,
        chunk: int,
    ) -> tuple[Tensor, Tensor]:
        exact = torch.promote_types(hidden_NH.dtype, torch.float32)
        kernel = logprob_kernel(hidden_NH)
        logprobs_N, entropy_N = hidden_NH.new_empty((2, len(ids_N)), dtype=exact).unbind()
        for rows in _parts(len(ids_N), chunk):
            logits_CV = functional.linear(hidden_NH[rows], weight_VH, bias_V)
            if kernel is not None:
                outs = (logprobs_N[rows], entropy_N[rows])
                kernel.read(logits_CV, ids_N[rows], scale=1 / options.temperature, outs=outs)
                continue
            for block in _blocks(logits_CV):
                at = slice(rows.start + block.start, rows.start + block.stop)
                logs = _log_softmax(logits_CV[block], options)
                logprobs_N[at] = logs.gather(1, ids_N[at, None])[:, 0]
                if options.with_entropy:
                    entropy_N[at] = -logs.exp().mul_(logs.clamp_(min=LEAST_LOG)).sum(dim=1)
        ctx.reading, ctx.chunk = options, chunk
        ctx.save_for_backward(hidden_NH, weight_VH, bias_V, ids_N, entropy_N)
        if not options.entropy_gradient:
            ctx.mark_non_differentiable(entropy_N)
        return logprobs_N, entropy_N

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor | None, ...]:
        hidden_NH, weight_VH, bias_V, ids_N, entropy_N = ctx.saved_tensors
        wants_hidden, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        hidden_slope = torch.empty_like(hidden_NH) if wants_hidden else None
        # The first chunk writes the weight's slope, later chunks add; without tokens it is 0.
        new_slope = torch.empty_like if len(ids_N) else torch.zeros_like
        weight_slope = new_slope(weight_VH) if wants_weight else None
        bias_slope = torch.zeros_like(bias_V, dtype=slopes[0].dtype) if wants_bias else None
        with torch.autocast(hidden_NH.device.type, enabled=False):
            for rows in _parts(len(ids_N), ctx.chunk):
                slope_CV = functional.linear(hidden_NH[rows], weight_VH, bias_V)
                given = (ids_N[rows], entropy_N[rows], *(slope[rows] for slope in slopes))
                _logits_slope_(slope_CV, ctx.reading, *given)
                if hidden_slope is not None:
                    torch.mm(slope_CV, weight_VH, out=hidden_slope[rows])
                if weight_slope is not None:
                    weight_slope.addmm_(slope_CV.T, hidden_NH[rows], beta=min(rows.start, 1))
                if bias_slope is not None:
                    bias_slope += slope_CV.sum(dim=0, dtype=bias_slope.dtype)
        if bias_slope is not None:
            bias_slope = bias_slope.to(bias_V.dtype)
        return hidden_slope, weight_slope, bias_slope, None, None, None


def _logits_slope_(logits_CV: Tensor, options: LogprobOptions, *given: Tensor) -> None:
    """Overwrite logits with their gradient, given ids, entropies and the slopes of both outputs."""
    kernel = None if options.entropy_gradient else logprob_kernel(logits_CV)
    if kernel is not None:
        ids_C, _, slopes_C, _ = given
        kernel.slope_(logits_CV, ids_C, scale=1 / options.temperature, slopes_N=slopes_C)
        return
    for block in _blocks(logits_CV):
        part = (each[block] for each in given)
        logits_CV[block] = _logits_slope(logits_CV[block], options, *part)


def _logits_slope(
    logits_CV: Tensor, options: LogprobOptions, ids_C: Tensor, entropy_C: Tensor, *slopes: Tensor
) -> Tensor:
    """Return the gradient with respect to the logits, given the slopes of both outputs.

    d log p_i / d l_j = 1[i = j] - p_j and d H / d l_j = -p_j (log p_j + H), both / temperature.
    """
    logprob_C1, entropy_slope_C1 = (slope[:, None] / options.temperature for slope in slopes)
    logs_CV = _log_softmax(logits_CV, options)
    if options.entropy_gradient:
        probs_CV = logs_CV.exp()
        logs_CV.clamp_(min=LEAST_LOG).add_(entropy_C[:, None])
        logs_CV.mul_(entropy_slope_C1).add_(logprob_C1)
        slope_CV = probs_CV.mul_(logs_CV).neg_()
    else:
        slope_CV = logs_CV.exp_().mul_(-logprob_C1)
    return slope_CV.scatter_add_(1, ids_C[:, None], logprob_C1)


def _log_softmax(logits_CV: Tensor, options: LogprobOptions) -> Tensor:
    exact = torch.promote_types(logits_CV.dtype, torch.float32)
    if options.temperature != 1:
        logits_CV = logits_CV.to(exact) / options.temperature
    return functional.log_softmax(logits_CV, dim=-1, dtype=exact)


def _parts(total: int, size: int) -> Iterator[slice]:
    return (slice(i, min(i + size, total)) for i in range(0, total, size))


def _blocks(logits_CV: Tensor) -> Iterator[slice]:
    """Return slices of a chunk's rows: all rows on a GPU, as many as fit into a CPU's cache."""
    num_rows, vocabulary = logits_CV.shape
    size = max(1, CPU_BLOCK // vocabulary) if logits_CV.device.type == "cpu" else num_rows
    return _parts(num_rows, size)
