"""Interfaces of the kernels, which models, engines and decoders call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor


class AverageKernel(Protocol):
    """A kernel that updates moving averages of fp32 weights stored in two 16-bit halves."""

    def update_averages(
        self, averages: Sequence[Tensor], halves: Sequence[tuple[Tensor, Tensor]], new: float
    ) -> None:
        """Update averages: average += new * (weight - average), with weights in 16-bit halves."""


class LogprobsKernel(Protocol):
    """A kernel that computes log-probs from logits (N, V), and the gradient of the logits.

    On a GPU rows may be padded to a multiple of 16 logits; the padding is overwritten.
    """

    def reduce_logits(
        self, logits_NV: Tensor, ids_N: Tensor, *, scale: float, outs: tuple[Tensor, Tensor, Tensor]
    ) -> None:
        """Write each row's log-sum-exp, entropy and logit of the token id to the three ``outs``.

        The logits are multiplied by ``scale`` first.
        """

    def replace_by_gradient_(
        self,
        logits_NV: Tensor,
        ids_N: Tensor,
        *,
        scale: float,
        log_sums_N: Tensor,
        slopes_N: Tensor,
    ) -> None:
        """Overwrite the logits with their gradient, d sum(slopes * log-probs) / d logits."""


class DrawKernel(Protocol):
    """A kernel that samples tokens."""

    def draw(
        self,
        logits_NV: Tensor,
        draws_N: Tensor,
        *,
        scale: float,
        barred_N: Tensor | None,
        end_id: int,
    ) -> tuple[Tensor, Tensor]:
        """Sample tokens (N,) by inverse CDF; return them and their fp32 log-probs (N,).

        ``draws_N`` are uniform random numbers. Where ``barred_N`` is True, ``end_id`` cannot be
        sampled.
        """


class SoftmaxKernel(Protocol):
    """A kernel that computes the softmax of rows, and the gradient of its inputs, in place."""

    def softmax_(self, scores: Tensor) -> Tensor:
        """Overwrite contiguous scores (..., S) with their softmax over S, and return them."""

    def gradient_(self, slopes: Tensor, shares: Tensor, *, scale: float) -> Tensor:
        """Turn ``slopes``, the shares' gradient, into ``scale`` * the softmax inputs' gradient."""


class AttentionKernel(Protocol):
    """A kernel that computes the attention of one new token per row over a KV cache."""

    def __call__(
        self,
        query_BQD: Tensor,
        key_BKD: Tensor,
        value_BKD: Tensor,
        kv_cache_2MKLD: Tensor,
        pages_BG: Tensor,
        positions_B: Tensor,
        columns: int,
    ) -> Tensor:
        """Store keys and values at the rows' positions; return attention (B, Q, D).

        Column i of row b is column i % L of page ``pages_BG[b, i // L]`` of the KV cache. The
        result of a row whose position is not below ``columns`` is undefined.
        """
