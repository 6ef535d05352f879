"""Log-probabilities from logits in one pass on a CPU, where torch takes five passes.

Also the softmax of attention scores in bf16 or fp32, because torch is slow on short rows.
Shapes: N = tokens, V = vocabulary, ... = any leading dimensions, S = scores of a row.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor


class LogprobKernel:
    """The compiled functions of logprobs.c, for contiguous logits of ``dtype`` on a CPU."""

    def __init__(self, library: Any, dtype: torch.dtype) -> None:
        self._library = library
        self.dtype = dtype

    def reduce_logits(
        self, logits_NV: Tensor, ids_N: Tensor, *, scale: float, outs: tuple[Tensor, Tensor, Tensor]
    ) -> None:
        """Write log-sum-exps, entropies and the ids' logits, each (N,) in fp32, to ``outs``.

        All are computed from ``scale`` times the logits. The logits may be a block of the
        vocabulary. Ids then count from the block's first entry; for an id outside the block the
        third vector keeps its value.
        """
        self._library.logprobs_read(
            *self._shared_arguments(logits_NV, ids_N, scale),
            *(ctypes.c_void_p(out_N.data_ptr()) for out_N in outs),
        )

    def replace_by_gradient_(
        self,
        logits_NV: Tensor,
        ids_N: Tensor,
        *,
        scale: float,
        log_sums_N: Tensor,
        slopes_N: Tensor,
    ) -> None:
        """Overwrite the logits with their gradient, d sum(slopes * log-probs) / d logits.

        ``slopes_N`` are the gradients of the log-probs. ``log_sums_N`` (fp32) are the log-sum-exps
        of scale * logits over the whole vocabulary.
        """
        vectors = (log_sums_N.contiguous(), slopes_N.float().contiguous())
        self._library.logprobs_slope(
            *self._shared_arguments(logits_NV, ids_N, scale),
            *(ctypes.c_void_p(vector_N.data_ptr()) for vector_N in vectors),
        )

    def draw(
        self,
        logits_NV: Tensor,
        draws_N: Tensor,
        *,
        scale: float,
        barred_N: Tensor | None,
        end_id: int,
    ) -> tuple[Tensor, Tensor]:
        """Sample tokens (N,) by inverse CDF; return them and their fp32 log-probabilities (N,).

        ``draws_N`` are uniform random numbers. A row in which ``barred_N`` is True cannot sample
        ``end_id``.
        """
        tokens_N = torch.empty(len(logits_NV), dtype=torch.int64)
        logprobs_N = torch.empty(len(logits_NV))
        draws_N = draws_N.double().contiguous()
        barred_N = None if barred_N is None else barred_N.contiguous()  # kept until the call ends
        barred = None if barred_N is None else barred_N.data_ptr()
        self._library.logprobs_draw(
            *(ctypes.c_void_p(at) for at in (logits_NV.data_ptr(), draws_N.data_ptr(), barred)),
            *(ctypes.c_int64(size) for size in logits_NV.shape),
            ctypes.c_float(scale),
            ctypes.c_int64(end_id),
            *(ctypes.c_void_p(out_N.data_ptr()) for out_N in (tokens_N, logprobs_N)),
        )
        return tokens_N, logprobs_N

    def _shared_arguments(self, logits_NV: Tensor, ids_N: Tensor, scale: float) -> tuple[Any, ...]:
        assert logits_NV.is_contiguous()
        assert logits_NV.dtype is self.dtype
        assert ids_N.is_contiguous()
        return (
            ctypes.c_void_p(logits_NV.data_ptr()),
            ctypes.c_void_p(ids_N.data_ptr()),
            *(ctypes.c_int64(size) for size in logits_NV.shape),
            ctypes.c_float(scale),
        )


class CpuSoftmax:
    """The compiled functions of softmax.c, for contiguous numbers of one dtype."""

    def __init__(self, library: Any) -> None:
        self._library = library

    def softmax_(self, scores: Tensor) -> Tensor:
        """Overwrite scores (..., S) with their softmax over S, and return them."""
        pointer = ctypes.c_void_p(scores.data_ptr())
        self._library.softmax_rows(pointer, *_count_rows_and_columns(scores))
        return scores

    def gradient_(self, slopes: Tensor, shares: Tensor, *, scale: float) -> Tensor:
        """Turn ``slopes``, the shares' gradient, into ``scale`` * the softmax inputs' gradient."""
        pointers = (ctypes.c_void_p(x.data_ptr()) for x in (slopes, shares))
        sizes = _count_rows_and_columns(slopes)
        self._library.softmax_slopes(*pointers, *sizes, ctypes.c_float(scale))
        return slopes


def _count_rows_and_columns(x: Tensor) -> tuple[ctypes.c_int64, ctypes.c_int64]:
    return ctypes.c_int64(x.numel() // x.shape[-1]), ctypes.c_int64(x.shape[-1])
