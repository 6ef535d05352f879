"""Remove and add padding. Shapes: B = responses, T = tokens of the longest response."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from rlhf.base.host_copies import copy_to_device
from rlhf.base.types import PromptBatch, Responses
from rlhf.rollout.parking import Request


class Sampled(NamedTuple):
    """One response: its tokens with their log-probabilities, and whether it ended by itself."""

    ids: list[int]
    logprobs: list[float]
    has_ended: bool


def unpad_prompts(prompts: PromptBatch) -> list[list[int]]:
    """Return the token ids of each prompt without padding; this copies to the host twice."""
    rows = zip(prompts.ids_BP.tolist(), prompts.attend_BP.tolist(), strict=True)
    return [[i for i, attends in zip(*row, strict=True) if attends] for row in rows]


def pad_responses(
    answers: Sequence[Request | Sampled], *, pad_id: int, device: torch.device
) -> Responses:
    """Return the answers as right-padded responses (B, T); all their tokens are kept."""
    shape = (len(answers), max(len(answer.ids) for answer in answers))
    ids_BT, logprobs_BT = torch.full(shape, pad_id), torch.zeros(shape)
    keep_BT = torch.zeros(shape, dtype=torch.bool)
    for row, answer in enumerate(answers):
        size = len(answer.ids)
        ids_BT[row, :size] = torch.tensor(answer.ids)
        logprobs_BT[row, :size] = torch.tensor(answer.logprobs)
        keep_BT[row, :size] = True
    ended_B = torch.tensor([answer.has_ended for answer in answers])
    ids_BT, keep_BT, ended_B, logprobs_BT = (
        copy_to_device(each, device) for each in (ids_BT, keep_BT, ended_B, logprobs_BT)
    )
    return Responses(ids_BT, keep_BT, ended_B, logprobs_BT)
