"""The kernels of a device, and the comparisons with torch that kernel_checks.py may require.

``python -m rlhf.gpu_check`` repeats the comparisons of AdamW, log-probs and attention at the sizes
of real models.

Shapes: N = tokens, F = the first tokens, the only ones compared, V = vocabulary, R = rows, G =
pages of a row, M = pages of a KV cache and L = their columns, K = key/value heads, Q = query heads
per key/value head, D = head size, S = scores of a row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from rlhf.config.choices import Dtype
from rlhf.kernels.interfaces import (
    AttentionKernel,
    AverageKernel,
    DrawKernel,
    LogprobsKernel,
    SoftmaxKernel,
)
from rlhf.kernels.kernel_checks import Pairs, are_off, use_if_equal
from rlhf.kernels.torch_adamw import (
    AdamwScalars,
    AdamwUpdate,
    Split,
    SplitState,
    TorchAdamw,
    fp32_weights,
)

COMPARED_ROWS = 32  # rows of logits, or of attention scores, that are compared
MOST_WEIGHTS = 2**18  # most weights of a parameter in the comparisons of AdamW and averages
SCALE = 1.25  # factor on the logits in comparisons; a run has 1 / temperature
SCALARS = AdamwScalars(0.37, 1e-2, 0.9, 0.95, 1e-8, 0.1, 0.19, 0.0975)  # of a second step


class CheckedKernels:
    """The kernels of a device; torch replaces a kernel whose results differ from torch's.

    ``kernels`` is the module cpu_kernels or gpu_kernels. Its functions have the names of methods of
    this class; they return None if there is no kernel, and may raise any error if it cannot run.
    ``rlhf.kernels.torch_adamw.Split`` explains how two 16-bit halves store an fp32 number.
    """

    def __init__(self, kernels: ModuleType, device: str) -> None:
        self._kernels = kernels
        self._device = device

    def summarize_kernels(self, dtype: Dtype) -> str | None:
        """Return one line that names the kernels of a run in ``dtype``; None to print no line."""
        if are_off():
            return "kernels: none, as hardware.kernels=off"
        summarize: Callable[[Dtype], str | None] = self._find("summarize_kernels")
        return summarize(dtype)

    def adamw_kernel(
        self, sizes: Sequence[int], device: torch.device, moments: torch.dtype
    ) -> AdamwUpdate | None:
        """Return the kernel for AdamW steps of fp32 parameters stored in 16-bit halves."""
        load, short = self._kernels.adamw_kernel, _shorten(sizes)
        load_short = partial(load, short, device, moments)
        compare = partial(compare_adamw, load_short, short, device, moments)
        return self._use("AdamW", partial(load, sizes, device, moments), compare)

    def average_kernel(self, sizes: Sequence[int], device: torch.device) -> AverageKernel | None:
        """Return the kernel for moving averages of fp32 parameters stored in 16-bit halves."""
        load, short = self._find("average_kernel"), _shorten(sizes)
        compare = partial(_compare_averages, partial(load, short, device), short, device)
        return self._use("moving averages", partial(load, sizes, device), compare)

    def logprobs_kernel(self, logits: Tensor) -> LogprobsKernel | None:
        """Return the kernel that computes log-probs from ``logits``."""
        load = self._kernels.logprobs_kernel
        return self._use_on_rows("log-probs", load, compare_logprobs, logits)

    def draw_kernel(self, logits: Tensor) -> DrawKernel | None:
        """Return the kernel that samples from ``logits``."""
        return self._use_on_rows("sampling", self._find("draw_kernel"), _compare_draws, logits)

    def softmax_kernel(self, scores: Tensor) -> SoftmaxKernel | None:
        """Return the kernel that computes the softmax of attention ``scores`` (..., S)."""
        return self._use_on_rows("softmax", self._find("softmax_kernel"), _compare_softmax, scores)

    def attention_kernel(self, kv_cache_2MKLD: Tensor, group: int) -> AttentionKernel | None:
        """Return the kernel for the attention of one new token per row over a KV cache.

        Each key/value head serves ``group`` query heads. ``kv_cache_2MKLD`` is an empty KV cache of
        the kind to read, of two pages or more.
        """
        _, _, *heads, size = kv_cache_2MKLD.shape
        load = partial(self._find("attention_kernel"), kv_cache_2MKLD.dtype)
        count = len(kv_cache_2MKLD[0]) // 2 * 2  # rows of two pages
        pages_RG = torch.arange(count, device=kv_cache_2MKLD.device).view(2, -1).T
        compare = partial(compare_attention, kv_cache_2MKLD, pages_RG.contiguous(), group)
        shape = (kv_cache_2MKLD.dtype, *heads, size, group)
        return self._use("attention over the KV cache", load, compare, shape=shape)

    def _find(self, name: str) -> Callable[..., Any]:
        """Return the function ``name`` of the kernels, or a function that returns None."""
        return getattr(self._kernels, name, lambda *_, **__: None)

    def _use(self, name: str, load: Any, compare: Any, **options: Any) -> Any | None:
        return use_if_equal(name, self._device, load, compare, **options)

    def _use_on_rows(self, name: str, load: Any, compare: Any, rows: Tensor) -> Any | None:
        """Return the kernel for ``rows`` (..., width), compared once for each width and dtype."""
        width = rows.shape[-1]
        compare = partial(compare, rows=rows.view(-1, width)[:COMPARED_ROWS])
        return self._use(name, partial(load, rows), compare, shape=(rows.dtype, width))


def _shorten(sizes: Sequence[int]) -> list[int]:
    """Return the distinct ``sizes``, each cut to at most ``MOST_WEIGHTS`` weights."""
    return sorted({min(size, MOST_WEIGHTS) for size in sizes})


def random_states(
    sizes: Sequence[int], device: torch.device, moments: torch.dtype
) -> tuple[list[Any], list[Tensor]]:
    """Return random states and bf16 gradients, one of each per parameter of the given sizes."""
    states, gradients = [], []
    for size in sizes:
        weights, gradient, first_moment = torch.randn(3, size, device=device)
        high, low = torch.empty_like(weights, dtype=torch.bfloat16), weights.to(torch.int16)
        Split(high, low).split(weights)
        second_moment = first_moment.square().to(moments)
        states.append(SplitState(high, low, first_moment.to(moments), second_moment))
        gradients.append(gradient.bfloat16())
    return states, gradients


def compare_adamw(
    load: Any, sizes: Sequence[int], device: torch.device, moments: torch.dtype, _kernel: Any
) -> Pairs:
    """Yield pairs (kernel, torch): sums of squared gradients, then each parameter's new state."""
    states, gradients = random_states(sizes, device, moments)
    copies = [SplitState(*(part.clone() for part in state)) for state in states]
    scalars = [SCALARS] * len(sizes)
    updates = [load(), TorchAdamw()]
    squares = [torch.as_tensor(each.sum_of_squares(gradients)).double() for each in updates]
    yield squares[0], squares[1]
    for update, its_states in zip(updates, (states, copies), strict=True):
        update.step(its_states, gradients, scalars)
    for state, copy in zip(states, copies, strict=True):
        yield fp32_weights(Split(*state[:2])), fp32_weights(Split(*copy[:2]))
        yield from zip(state[2:], copy[2:], strict=True)


def _compare_averages(load: Any, sizes: Sequence[int], device: torch.device, _kernel: Any) -> Pairs:
    states, _ = random_states(sizes, device, torch.float32)
    halves = [Split(*state[:2]) for state in states]
    averages = [state.first for state in states]
    expected = [x.lerp(fp32_weights(half), 0.3) for x, half in zip(averages, halves, strict=True)]
    load().update_averages(averages, halves, 0.3)
    return zip(averages, expected, strict=True)


def _random_rows(rows: Tensor) -> Tensor:
    """Return random numbers with the shape, strides, dtype and device of ``rows``."""
    numbers = torch.empty_strided(rows.shape, rows.stride(), dtype=rows.dtype, device=rows.device)
    return numbers.normal_(std=3)


def compare_logprobs(kernel: Any, *, rows: Tensor, compared: int = COMPARED_ROWS) -> Pairs:
    """Yield log-sum-exps, entropies, logits and gradients of the first ``compared`` rows."""
    logits_NV = _random_rows(rows)
    ids_N = torch.randint(logits_NV.shape[1], logits_NV.shape[:1], device=rows.device)
    slopes_N = torch.randn(ids_N.shape, device=rows.device)
    x_FV, ids_F1 = SCALE * logits_NV[:compared].double(), ids_N[:compared, None]
    log_sum_F1 = x_FV.logsumexp(1, keepdim=True)
    p_FV = (x_FV - log_sum_F1).exp()
    entropy_F1 = log_sum_F1 - (p_FV * x_FV).sum(1, keepdim=True)
    logit_F1 = x_FV.gather(1, ids_F1)
    gradient_FV = p_FV.neg_().scatter_add_(1, ids_F1, torch.ones_like(logit_F1))

    outs = torch.full((3, len(ids_N)), torch.nan, device=rows.device)
    kernel.reduce_logits(logits_NV, ids_N, scale=SCALE, outs=tuple(outs))
    expected = (log_sum_F1[:, 0], entropy_F1[:, 0], logit_F1[:, 0])
    yield from zip(outs[:, :compared], expected, strict=True)
    kernel.replace_by_gradient_(
        logits_NV, ids_N, scale=SCALE, log_sums_N=outs[0], slopes_N=slopes_N
    )
    yield logits_NV[:compared], SCALE * slopes_N[:compared, None] * gradient_FV


def _compare_draws(kernel: Any, *, rows: Tensor) -> Pairs:
    """Compare tokens drawn with the numbers in the middle of the tokens' intervals of the CDF."""
    logits_NV = _random_rows(rows)
    p_NV = (SCALE * logits_NV.double()).softmax(1)
    tokens_N1 = p_NV.multinomial(1)
    ends_N1, p_N1 = p_NV.cumsum(1).gather(1, tokens_N1), p_NV.gather(1, tokens_N1)
    draws_N = (ends_N1 - p_N1 / 2)[:, 0]
    drawn_N, logprobs_N = kernel.draw(logits_NV, draws_N, scale=SCALE, barred_N=None, end_id=0)
    return [(drawn_N, tokens_N1[:, 0]), (logprobs_N, p_N1.log()[:, 0])]


def _compare_softmax(kernel: Any, *, rows: Tensor) -> Pairs:
    scores, slopes = _random_rows(rows), _random_rows(rows)
    shares = scores.double().softmax(1)
    inner = (shares * slopes.double()).sum(1, keepdim=True)
    gradient = SCALE * shares * (slopes.double() - inner)
    yield kernel.softmax_(scores), shares
    yield kernel.gradient_(slopes, shares.to(slopes.dtype), scale=SCALE), gradient


def compare_attention(
    kv_cache_2MKLD: Tensor, pages_RG: Tensor, group: int, kernel: AttentionKernel
) -> Pairs:
    """Compare the newest token's stored key and value, and its output, in three rows.

    These are the first, middle and last row of ``pages_RG``, the pages of each row. The KV cache is
    zero again afterwards.
    """
    kv_heads, page, size = kv_cache_2MKLD.shape[2:]
    rows, columns, device = len(pages_RG), page * pages_RG.shape[1], kv_cache_2MKLD.device
    compared = sorted({0, rows // 2, rows - 1})
    heads = [group * kv_heads, kv_heads, kv_heads]
    joint = torch.randn(rows, sum(heads), size, device=device).to(kv_cache_2MKLD.dtype)
    query, key, value = torch.split(joint, heads, dim=1)  # strided, like a joint product
    positions_R = (columns - 1 + 31 * torch.arange(rows, device=device)) % columns
    positions_R[1:][-1:] = 0  # the last row has no token before the newest
    pairs = []
    try:
        for row in compared:
            kv_cache_2MKLD[:, pages_RG[row]] = torch.randn_like(kv_cache_2MKLD[:, pages_RG[row]])
        output = kernel(query, key, value, kv_cache_2MKLD, pages_RG, positions_R, columns)
        for row in compared:
            last = int(positions_R[row])
            cache_2KLD = kv_cache_2MKLD[:, pages_RG[row]].transpose(1, 2).flatten(2, 3)
            newest_2KD = torch.stack([key[row], value[row]])
            pairs.append((cache_2KLD[:, :, last].clone(), newest_2KD))
            keys_KLD, values_KLD = cache_2KLD[:, :, : last + 1].double()
            query_KQD = query[row].double().view(kv_heads, group, size)
            weights_KQL = (query_KQD @ keys_KLD.mT * size**-0.5).softmax(-1)
            pairs.append((output[row], (weights_KQL @ values_KLD).view(-1, size)))
    finally:
        kv_cache_2MKLD.zero_()
    return pairs
