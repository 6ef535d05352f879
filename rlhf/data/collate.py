"""Collate rows of token ids into padded batches. B sequences, P prompt tokens, S = all tokens."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rlhf.base.host_copies import copy_to_device
from rlhf.base.padded_rows import pad_rows
from rlhf.base.types import Extras, PreferenceBatch, PromptBatch, SequenceBatch
from rlhf.data.batching import padded_width


def collate_sequences(
    ids: Sequence[Sequence[int]],
    prompt_tokens: Sequence[int],
    *,
    pad_id: int,
    device: torch.device,
    max_width: int = 0,
    width: int | None = None,
    observed: Sequence[Sequence[Sequence[int]]] = (),
) -> SequenceBatch:
    """Return right-padded sequences (B, S); ``keep_BS`` marks the response, end token included.

    ``observed`` holds the start and end of each observation of an episode, which is not marked.

    The width may be rounded up to at most ``max_width`` tokens.
    """
    width = width or padded_width(max(len(row) for row in ids), max_width=max_width)
    ids_BS, attend_BS = pad_rows(ids, pad_id=pad_id, width=width)
    columns_S = torch.arange(width)
    keep_BS = attend_BS & (columns_S >= torch.tensor(prompt_tokens)[:, None])
    for row, spans in enumerate(observed):
        for start, end in spans:
            keep_BS[row, start:end] = False
    return SequenceBatch(*(copy_to_device(part, device) for part in (ids_BS, attend_BS, keep_BS)))


def collate_pairs(
    chosen: Sequence[Sequence[int]],
    rejected: Sequence[Sequence[int]],
    prompt_tokens: Sequence[int],
    *,
    pad_id: int,
    device: torch.device,
    max_width: int = 0,
) -> PreferenceBatch:
    """Return pairs of right-padded sequences (B, S), all padded to the same length.

    The width may be rounded up to at most ``max_width`` tokens.
    """
    width = padded_width(max(len(row) for row in (*chosen, *rejected)), max_width=max_width)
    sides = (
        collate_sequences(side, prompt_tokens, pad_id=pad_id, device=device, width=width)
        for side in (chosen, rejected)
    )
    return PreferenceBatch(*sides)


def collate_prompts(
    ids: Sequence[Sequence[int]],
    texts: list[str],
    draws_BT: Tensor,
    *,
    pad_id: int,
    device: torch.device,
    columns: Extras | None = None,
) -> PromptBatch:
    """Return left-padded prompts (B, P), so that every response starts after the last column."""
    padded = pad_rows(ids, pad_id=pad_id, on_left=True)
    ids_BP, attend_BP = (copy_to_device(each, device) for each in padded)
    return PromptBatch(ids_BP, attend_BP, copy_to_device(draws_BT, device), texts, columns)
