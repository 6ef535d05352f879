"""Log-probabilities from logits in one pass on a GPU, where torch takes ten passes.

Shapes: N = tokens, V = vocabulary.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import Tensor

BLOCK = 2**12  # logits that a program has in registers at a time: 16 in each of 256 threads
WARPS = 8
FUSED = {"enable_fp_fusion": True}  # Triton warns if this is not set: the default changes in 3.10


class GpuLogprobKernel:
    """A ``LogprobsKernel`` that launches the kernels of logprobs_triton.py."""

    def __init__(self, kernels: ModuleType) -> None:
        self._kernels = kernels

    def reduce_logits(
        self, logits_NV: Tensor, ids_N: Tensor, *, scale: float, outs: tuple[Tensor, Tensor, Tensor]
    ) -> None:
        """Write each row's log-sum-exp, entropy and logit of the token id to the three ``outs``."""
        assert all(out_N.is_contiguous() and out_N.dtype is torch.float32 for out_N in outs)
        self._launch("reduce_row_kernel", logits_NV, ids_N, outs, scale=scale)

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
        vectors = (log_sums_N.contiguous(), slopes_N.float().contiguous())
        self._launch("gradient_kernel", logits_NV, ids_N, *vectors, scale=scale)

    def _launch(
        self, name: str, logits_NV: Tensor, ids_N: Tensor, *vectors: Any, scale: float
    ) -> None:
        rows, size = logits_NV.shape
        stride = size if logits_NV.is_contiguous() else logits_NV.stride(0)
        assert size <= stride < size + 16
        assert logits_NV.stride(1) == 1
        assert ids_N.is_contiguous()
        constants = {"BLOCK": BLOCK, "num_warps": WARPS, **FUSED}
        kernel = getattr(self._kernels, name)[rows,]
        kernel(logits_NV, ids_N, *vectors, scale, size, stride, **constants)
