"""Divide rows into optimizer steps and micro-batches, and collate them into padded batches.

Shapes: B = sequences, P = prompt tokens, S = all tokens.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from itertools import count
from typing import NamedTuple

import torch
from torch import Tensor

from rlhf.base.errors import DataError
from rlhf.base.random_streams import Shuffle
from rlhf.base.ranks import Ranks
from rlhf.base.types import (
    Extras,
    PreferenceBatch,
    PromptBatch,
    SequenceBatch,
    copy_to_device,
    pad_rows,
)

UNROUNDED_BELOW = 64  # tokens; shorter batches are not padded to a rounded width
LOOK_AHEAD = 8  # maximum number of prompts that wait for a step with more room


def padded_width(tokens: int, *, max_width: int) -> int:
    """Return ``tokens`` rounded up to one of a few widths, but not past ``max_width``.

    There are eight widths between a power of two and the next one. Below 64 tokens the width is not
    rounded. Libraries compile and keep code for every width. Without rounding, the code for all
    lengths of a data set would take hundreds of megabytes.
    """
    step = 1 << max(0, tokens.bit_length() - 4) if tokens >= UNROUNDED_BELOW else 1
    return min(-(-tokens // step) * step, max(tokens, max_width))


def assign_rows_to_ranks(lengths: Sequence[int], *, ranks: int, micro: int) -> list[list[int]]:
    """Divide the rows of one global batch by length; return the row numbers of each rank.

    Every ``micro`` consecutive rows of a rank are a micro-batch of rows of similar length, for
    little padding. The micro-batches are dealt one by one, the longest first, each to the rank with
    the smallest total width so far. ``len(lengths)`` must be a multiple of ``ranks * micro``.
    """
    order = sorted(range(len(lengths)), key=lambda row: -lengths[row])
    share = len(order) // ranks
    rows_of_rank: list[list[int]] = [[] for _ in range(ranks)]
    widths = [0] * ranks  # sum of the widths of each rank's micro-batches
    for start in range(0, len(order), micro):
        open_ranks = (rank for rank in range(ranks) if len(rows_of_rank[rank]) < share)
        rank = min(open_ranks, key=widths.__getitem__)
        rows_of_rank[rank].extend(order[start : start + micro])
        widths[rank] += lengths[order[start]]
    return rows_of_rank


class EvalRows(NamedTuple):
    """One rank's rows of a held-out batch; ``keep_B`` is False for repeats that fill the batch."""

    rows: list[int]
    keep_B: Tensor


def eval_batches(
    total: int, *, batch_size: int, ranks: Ranks, lengths: Sequence[int] | None = None
) -> Iterator[EvalRows]:
    """Yield this rank's ``batch_size`` rows of each batch over ``total`` examples.

    With ``lengths`` (one per example) the longest come first, so that batches need less padding.
    """
    stride = batch_size * ranks.size
    order = list(range(total))
    if lengths is not None:
        order.sort(key=lambda row: -lengths[row])
    for start in range(0, total, stride):
        mine = range(start + ranks.rank * batch_size, start + (ranks.rank + 1) * batch_size)
        keep_B = copy_to_device(torch.tensor([row < total for row in mine]), ranks.device)
        yield EvalRows([order[min(row, total - 1)] for row in mine], keep_B)


class PairStep(NamedTuple):
    """The pairs of one optimizer step, over all ranks."""

    rows: list[int]
    """Index of the pair in every slot; empty slots repeat the step's first pair, with weight 0."""
    weights: list[float]
    """One over the number of pairs of the slot's prompt; 0 for a repeated pair."""
    num_prompts: int
    """Number of prompts, by which the weighted sum of the losses is divided."""


def divide_pairs_into_steps(
    groups: Sequence[int], *, batch_size: int, epochs: float, seed: int
) -> list[PairStep]:
    """Return the pairs of each optimizer step; all pairs of a prompt are in one step.

    This follows https://arxiv.org/abs/2203.02155, section 3.5. ``groups[i]`` is the index of pair
    i's prompt, from 0 in order of first appearance. Prompts are shuffled for each epoch.
    Each prompt goes into the first step that has room for its pairs. Steps are added until ``epochs
    * len(groups)`` pairs are used. If every prompt has one pair, ``Shuffle`` determines the rows.

    Raises:
        DataError: if a prompt has more pairs than a step.
    """
    rows_of_group: list[list[int]] = [[] for _ in range(max(groups, default=-1) + 1)]
    for row, group in enumerate(groups):
        rows_of_group[group].append(row)
    largest = max(map(len, rows_of_group), default=0)
    if largest > batch_size:
        raise DataError(
            f"reward.batch_size={batch_size}: one prompt has {largest} pairs, and "
            "reward.group_pairs=true keeps them in one step; use "
            f"reward.batch_size={largest} or more, or reward.group_pairs=false"
        )
    shuffle = Shuffle(len(rows_of_group), seed=seed)
    order = (shuffle.batch_indices(position, 1)[0] for position in count())
    packed = _pack_groups([len(rows) for rows in rows_of_group], slots=batch_size, order=order)
    steps: list[PairStep] = []
    seen, batches = 0, len(groups) * epochs / batch_size
    while seen / batch_size < batches:
        taken = next(packed)
        rows = [row for group in taken for row in rows_of_group[group]]
        weights = [1 / len(rows_of_group[group]) for group in taken for _ in rows_of_group[group]]
        seen, empty = seen + len(rows), batch_size - len(rows)
        steps.append(PairStep(rows + rows[:1] * empty, weights + [0.0] * empty, len(taken)))
    return steps


def _pack_groups(sizes: Sequence[int], *, slots: int, order: Iterator[int]) -> Iterator[list[int]]:
    """Yield the groups of each step; a group that does not fit is tried first in the next step."""
    waiting: deque[int] = deque()
    while True:
        packed: list[int] = []
        too_large: list[int] = []
        room = slots
        while room and len(too_large) < LOOK_AHEAD:
            group = waiting.popleft() if waiting else next(order)
            if sizes[group] <= room:
                packed.append(group)
                room -= sizes[group]
            else:
                too_large.append(group)
        waiting.extendleft(reversed(too_large))
        yield packed


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

    ``observed`` holds the start and end of each observation of an episode; ``keep_BS`` is False
    there. The width may be rounded up to at most ``max_width`` tokens.
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
    """Return pairs of right-padded sequences (B, S), all padded to the same length."""
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
    """Return left-padded prompts (B, P), so that every response begins in column P."""
    padded = pad_rows(ids, pad_id=pad_id, on_left=True)
    ids_BP, attend_BP = (copy_to_device(tensor, device) for tensor in padded)
    return PromptBatch(ids_BP, attend_BP, copy_to_device(draws_BT, device), texts, columns)
