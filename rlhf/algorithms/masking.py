"""Sums, means and whitening under masks. Shapes: B = sequences, T = response tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from rlhf.base.metrics import Moments


def last_kept_index(keep_BT: Tensor) -> Tensor:
    """Return the index (B,) of each row's last kept token; every row must keep one."""
    if not keep_BT.any(dim=1).all():
        raise ValueError("every row must keep at least one token")
    columns_T = torch.arange(keep_BT.shape[1], device=keep_BT.device)
    return columns_T.masked_fill(~keep_BT, -1).amax(dim=1)


def masked_sum(x_BT: Tensor, keep_BT: Tensor) -> Tensor:
    """Return the sum over all kept cells; the other cells may hold anything, even infinities."""
    return x_BT.masked_fill(~keep_BT, 0.0).sum()


def sum_of_row_means(x_BT: Tensor, keep_BT: Tensor) -> Tensor:
    """Return the sum of each row's mean over its kept cells; a row without kept cells adds 0."""
    counts_B = keep_BT.sum(dim=1).clamp(min=1)
    return (x_BT.masked_fill(~keep_BT, 0.0).sum(dim=1) / counts_B).sum()


def whiten(x_BT: Tensor, keep_BT: Tensor, moments: Moments, *, shift_mean: bool = True) -> Tensor:
    """Scale ``x_BT`` to standard deviation 1; ``moments`` are of the kept cells of all ranks.

    With ``shift_mean`` the mean becomes 0, otherwise it stays. Cells that are not kept become 0.
    The 1e-8 under the root is taken from https://github.com/openai/lm-human-preferences.
    """
    mean, variance = moments.mean.to(x_BT.dtype), moments.variance.to(x_BT.dtype)
    whitened_BT = (x_BT - mean) * torch.rsqrt(variance + 1e-8)
    if not shift_mean:
        whitened_BT = whitened_BT + mean
    return whitened_BT.masked_fill(~keep_BT, 0.0)
