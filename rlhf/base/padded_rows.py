"""Pad rows of token ids to one width."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def pad_rows(
    rows: Sequence[Sequence[int]], *, pad_id: int, width: int | None = None, on_left: bool = False
) -> tuple[Tensor, Tensor]:
    """Return ids (B, S), padded to ``width`` or the longest row, and the mask of their tokens."""
    width = width or max(len(ids) for ids in rows)
    ids_BS = torch.full((len(rows), width), pad_id, dtype=torch.long)
    attend_BS = torch.zeros((len(rows), width), dtype=torch.bool)
    for row, ids in enumerate(rows):
        place = slice(width - len(ids), None) if on_left else slice(len(ids))
        ids_BS[row, place] = torch.tensor(ids)
        attend_BS[row, place] = True
    return ids_BS, attend_BS
