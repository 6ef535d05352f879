"""Compute log-probabilities of tokens from the output layer, without storing all its logits.

Shapes: N = chosen tokens, R = tokens and W = vocabulary entries of one block of logits, K = blocks
of the vocabulary, H = hidden size, V = vocabulary, B = sequences, S = tokens.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from rlhf.base.types import LogprobOptions, TokenLogprobs
from rlhf.kernels import kernels_for
from rlhf.kernels.cpu.cpu_layers import apply_linear
from rlhf.kernels.fp32_logits import fp32_logits
from rlhf.kernels.interfaces import LogprobsKernel

ALIGNMENT = 16  # rows of logits on a GPU start at multiples of this, so that reads are wide
LEAST_LOG = -1e4  # replaces log 0, so that 0 log 0 = 0; its exp is 0


class Block(NamedTuple):
    """The size of the blocks in which logits are computed; only one block exists at a time."""

    tokens: int
    vocabulary: int | None
    """Number of vocabulary entries; None if a block has all of them."""


CPU_BLOCK = Block(1024, 2048)  # a block's logits and weights fit into the caches
# Each block of tokens reads the whole weight and updates its gradient. On a GPU that computes B
# FLOPs per byte of memory traffic, arithmetic takes longer than this traffic if a block has more
# than 2 B / (1 - B / hidden size) tokens. At a hidden size of 2048 these are 331 tokens on an A100
# with 80 GB (B = 153) and 689 tokens on an H100 (B = 295).
GPU_BLOCK = Block(1024, None)
# More tokens than in GPU_BLOCK, so that the weight's gradient is rounded less often, but fewer
# entries of the vocabulary, so that the fp32 sum of this gradient takes hardly more memory than a
# GPU_BLOCK's logits. 4096 tokens of OPT-1.3B need 6.4 instead of 7.3 GB of memory traffic.
GPU_GRADIENT_BLOCK = Block(4096, 4096)
# True for a CPU, False for a GPU -> the blocks of the forward and of the backward pass.
BLOCKS = {True: (CPU_BLOCK, CPU_BLOCK), False: (GPU_BLOCK, GPU_GRADIENT_BLOCK)}
TORCH_TOKENS = 256  # tokens that torch processes at once; it stores their fp32 logits twice

DEFAULT_OPTIONS = LogprobOptions()


def fused_logprobs(
    hidden_NH: Tensor,
    weight_VH: Tensor,
    bias_V: Tensor | None,
    ids_N: Tensor,
    options: LogprobOptions = DEFAULT_OPTIONS,
    *,
    keeps_fp32: bool = False,
    block: Block | None = None,
) -> TokenLogprobs:
    """Return the log-probability of each token under softmax((W hidden + b) / temperature).

    Logits are computed one ``block`` at a time, and again in the backward pass, so that no tensor
    of shape (N, V) exists. Matrices are multiplied in autocast's dtype or, without autocast, in the
    dtype of ``hidden_NH``. With ``keeps_fp32`` the logits are not rounded to this dtype, only their
    gradient is. The softmax is computed in fp32.
    """
    device, dtype = hidden_NH.device.type, _dtype_of_products(hidden_NH)
    with torch.autocast(device, enabled=False):
        logprobs_N, entropy_N = _FusedLogprobs.apply(  # type: ignore[no-untyped-call]
            hidden_NH.to(dtype),
            weight_VH.to(dtype),
            None if bias_V is None else bias_V.to(dtype),
            ids_N,
            options,
            keeps_fp32 and dtype.itemsize < torch.float32.itemsize,
            (block, block) if block else BLOCKS[device == "cpu"],
        )
    return TokenLogprobs(logprobs_N.float(), entropy_N.float() if options.with_entropy else None)


def unrounded_logits(hidden: Tensor, weight_VH: Tensor, bias_V: Tensor | None) -> Tensor:
    """Return fp32 logits (..., V) of ``hidden`` (..., H); call this only where autograd is off."""
    dtype = _dtype_of_products(hidden)
    with torch.autocast(hidden.device.type, enabled=False):
        logits_NV = fp32_logits(hidden.to(dtype).flatten(0, -2), weight_VH.to(dtype), bias_V)
    return logits_NV.view(*hidden.shape[:-1], -1)


def _dtype_of_products(hidden: Tensor) -> torch.dtype:
    """Return the dtype in which matrices are multiplied: autocast's, or that of ``hidden``."""
    device = hidden.device.type
    is_cast = torch.is_autocast_enabled(device)
    return torch.get_autocast_dtype(device) if is_cast else hidden.dtype


def token_logprobs(
    logits_NV: Tensor, ids_N: Tensor, options: LogprobOptions = DEFAULT_OPTIONS
) -> TokenLogprobs:
    """Return log-probs of tokens from whole logits, for models that scale or cap their logits."""
    logits_NV = logits_NV.float() / options.temperature
    log_softmax_NV = functional.log_softmax(logits_NV, dim=-1)
    logprobs_N = log_softmax_NV.gather(-1, ids_N[..., None]).squeeze(-1)
    if not options.with_entropy:
        return TokenLogprobs(logprobs_N, None)
    if not options.entropy_gradient:
        log_softmax_NV = log_softmax_NV.detach()
    # The gradient of -p log p is infinite at p = 0. Clamping p to tiny does not change the sum.
    probs_NV = log_softmax_NV.exp().clamp(min=torch.finfo(torch.float32).tiny)
    return TokenLogprobs(logprobs_N, torch.special.entr(probs_NV).sum(dim=-1))


class _FusedLogprobs(torch.autograd.Function):
    """The autograd function of ``fused_logprobs``, for tensors of one dtype."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_NH: Tensor,
        weight_VH: Tensor,
        bias_V: Tensor | None,
        ids_N: Tensor,
        options: LogprobOptions,
        keeps_fp32: bool,
        blocks: tuple[Block, Block],
    ) -> tuple[Tensor, Tensor]:
        block, gradient_block = blocks
        columns = _split_range(len(weight_VH), block.vocabulary)
        exact = torch.promote_types(hidden_NH.dtype, torch.float32)
        log_sum_KN, entropy_KN = hidden_NH.new_empty((2, len(columns), len(ids_N)), dtype=exact)
        picked_N = torch.empty_like(log_sum_KN[0])
        for rows in _split_range(len(ids_N), block.tokens):
            for k, column in enumerate(columns):
                logits_RW = _block_logits(hidden_NH[rows], weight_VH, bias_V, column, keeps_fp32)
                outs = (log_sum_KN[k, rows], entropy_KN[k, rows], picked_N[rows])
                _reduce_block(logits_RW, ids_N[rows] - column.start, options, outs)
                del logits_RW  # before the next block is allocated
        log_sum_N = log_sum_KN.logsumexp(dim=0)
        # Chain rule: entropy over all ids = entropy over blocks + mean entropy within a block.
        log_share_KN = log_sum_KN - log_sum_N
        entropy_KN -= log_share_KN.clamp(min=LEAST_LOG)
        entropy_N = (log_share_KN.exp() * entropy_KN).sum(dim=0)
        ctx.options, ctx.keeps_fp32, ctx.block = options, keeps_fp32, gradient_block
        ctx.save_for_backward(hidden_NH, weight_VH, bias_V, ids_N, log_sum_N, entropy_N)
        if not options.entropy_gradient:
            ctx.mark_non_differentiable(entropy_N)
        return picked_N - log_sum_N, entropy_N

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor | None, ...]:
        hidden_NH, weight_VH, bias_V, ids_N, log_sum_N, entropy_N = ctx.saved_tensors
        wants_hidden, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        exact = slopes[0].dtype
        hidden_gradient = torch.zeros_like(hidden_NH, dtype=exact) if wants_hidden else None
        bias_gradient = torch.zeros_like(bias_V, dtype=exact) if wants_bias else None
        blocks_N = _split_range(len(ids_N), ctx.block.tokens)
        new_gradient = torch.empty_like if blocks_N else torch.zeros_like
        weight_gradient = new_gradient(weight_VH) if wants_weight else None
        is_rounded = len(blocks_N) > 1 and weight_VH.dtype is not exact
        with torch.autocast(hidden_NH.device.type, enabled=False):
            for column in _split_range(len(weight_VH), ctx.block.vocabulary):
                part_WH = None if weight_gradient is None else weight_gradient[column]
                sum_WH = part_WH  # the first block of tokens overwrites it, the others add
                if part_WH is not None and is_rounded:
                    sum_WH = torch.zeros_like(part_WH, dtype=exact)
                for rows in blocks_N:
                    terms = [x_N[rows] for x_N in (log_sum_N, entropy_N, *slopes)]
                    slope_RW = _block_logits(
                        hidden_NH[rows], weight_VH, bias_V, column, ctx.keeps_fp32
                    )
                    _replace_by_gradient_(slope_RW, ids_N[rows] - column.start, ctx.options, *terms)
                    slope_RW = slope_RW.to(hidden_NH.dtype)
                    if hidden_gradient is not None:
                        hidden_gradient[rows].add_(apply_linear(slope_RW, weight_VH[column].T))
                    if sum_WH is not None and is_rounded:
                        sum_WH += slope_RW.T @ hidden_NH[rows]
                    elif sum_WH is not None:
                        sum_WH.addmm_(slope_RW.T, hidden_NH[rows], beta=min(rows.start, 1))
                    if bias_gradient is not None:
                        bias_gradient[column].add_(slope_RW.sum(dim=0, dtype=exact))
                    del slope_RW
                if part_WH is not None and sum_WH is not None and is_rounded:
                    part_WH.copy_(sum_WH)
        exact_gradients = (hidden_gradient, weight_gradient, bias_gradient)
        gradients = (None if x is None else x.to(hidden_NH.dtype) for x in exact_gradients)
        return *gradients, None, None, None, None


def _block_logits(
    hidden_RH: Tensor,
    weight_VH: Tensor,
    bias_V: Tensor | None,
    column: slice,
    keeps_fp32: bool,
) -> Tensor:
    weight_WH, bias_W = weight_VH[column], None if bias_V is None else bias_V[column]
    padding = -len(weight_WH) % ALIGNMENT
    if not padding or hidden_RH.device.type == "cpu":
        return (fp32_logits if keeps_fp32 else apply_linear)(hidden_RH, weight_WH, bias_W)
    size, dtype = len(weight_WH), torch.float32 if keeps_fp32 else hidden_RH.dtype
    logits_RW = hidden_RH.new_empty(len(hidden_RH), size + padding, dtype=dtype)[:, :size]
    if keeps_fp32:
        return fp32_logits(hidden_RH, weight_WH, bias_W, out=logits_RW)
    if bias_W is None:
        return torch.mm(hidden_RH, weight_WH.T, out=logits_RW)
    return torch.addmm(bias_W, hidden_RH, weight_WH.T, out=logits_RW)


def _reduce_block(
    logits_RW: Tensor, ids_R: Tensor, options: LogprobOptions, outs: tuple[Tensor, Tensor, Tensor]
) -> None:
    """Reduce a block's logits, divided by the temperature, to the three tensors ``outs``.

    ``outs`` get each row's log-sum-exp, its entropy, and the logit of its id if this id is in the
    block of the vocabulary. The logits may be overwritten.
    """
    kernel = _select_logprob_kernel(logits_RW)
    if kernel is not None:
        kernel.reduce_logits(logits_RW, ids_R, scale=1 / options.temperature, outs=outs)
        return
    for part in _split_range(len(ids_R), TORCH_TOKENS):
        part_outs = (outs[0][part], outs[1][part], outs[2][part])
        _reduce_block_in_torch(logits_RW[part], ids_R[part], options, part_outs)


def _select_logprob_kernel(logits: Tensor) -> LogprobsKernel | None:
    return kernels_for(logits.device.type).logprobs_kernel(logits)


def _reduce_block_in_torch(
    logits_RW: Tensor, ids_R: Tensor, options: LogprobOptions, outs: tuple[Tensor, Tensor, Tensor]
) -> None:
    log_sum_R, entropy_R, picked_R = outs
    logits_RW = logits_RW.to(log_sum_R.dtype).div_(options.temperature)
    is_here_R, ids_R = _mask_and_clamp_ids(ids_R, logits_RW.shape[1])
    picked_R.copy_(torch.where(is_here_R, logits_RW.gather(1, ids_R[:, None])[:, 0], picked_R))
    torch.logsumexp(logits_RW, dim=1, out=log_sum_R)
    if options.with_entropy:
        finite_R = log_sum_R.clamp(min=torch.finfo(log_sum_R.dtype).min)
        logs_RW = logits_RW.sub_(finite_R[:, None])
        entropy_R.copy_(-logs_RW.exp().mul_(logs_RW.clamp_(min=LEAST_LOG)).sum(dim=1))


def _replace_by_gradient_(
    logits_RW: Tensor, ids_R: Tensor, options: LogprobOptions, *terms: Tensor
) -> None:
    """Overwrite a block's logits with their gradient.

    ``terms`` are four tensors: each token's log-sum-exp and entropy over the vocabulary, and the
    gradients of its log-prob and its entropy. Without the factor 1 / temperature,
    d log p_i / d l_j = 1[i = j] - p_j and d H / d l_j = -p_j (log p_j + H).
    """
    kernel = None if options.entropy_gradient else _select_logprob_kernel(logits_RW)
    if kernel is not None:
        scale, (log_sum_R, _, slopes_R, _) = 1 / options.temperature, terms
        kernel.replace_by_gradient_(
            logits_RW, ids_R, scale=scale, log_sums_N=log_sum_R, slopes_N=slopes_R
        )
        return
    for part in _split_range(len(ids_R), TORCH_TOKENS):
        _write_torch_gradient_(logits_RW[part], ids_R[part], options, *(x_R[part] for x_R in terms))


def _write_torch_gradient_(
    logits_RW: Tensor, ids_R: Tensor, options: LogprobOptions, *terms: Tensor
) -> None:
    log_sum_R, entropy_R, *slopes = terms
    slope_R1, entropy_slope_R1 = (slope[:, None] / options.temperature for slope in slopes)
    logs_RW = logits_RW.to(log_sum_R.dtype).div_(options.temperature).sub_(log_sum_R[:, None])
    if options.entropy_gradient:
        probs_RW = logs_RW.exp()
        logs_RW.clamp_(min=LEAST_LOG).add_(entropy_R[:, None])
        slope_RW = probs_RW.mul_(logs_RW.mul_(entropy_slope_R1).add_(slope_R1)).neg_()
    else:
        slope_RW = logs_RW.exp_().mul_(-slope_R1)
    is_here_R, ids_R = _mask_and_clamp_ids(ids_R, logits_RW.shape[1])
    logits_RW.copy_(slope_RW.scatter_add_(1, ids_R[:, None], slope_R1 * is_here_R[:, None]))


def _mask_and_clamp_ids(ids_R: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Return a mask of the ids in [0, size), and the ids clamped to this range."""
    return (ids_R >= 0) & (ids_R < size), ids_R.clamp(0, size - 1)


def _split_range(total: int, size: int | None) -> list[slice]:
    size = size or total
    return [slice(i, min(i + size, total)) for i in range(0, total, size)]
