"""Remove and add padding. Shapes: B = responses, T = tokens of the longest response."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from rlhf.base.host_copies import copy_to_device
from rlhf.base.padded_rows import pad_rows
from rlhf.base.types import PromptBatch, Responses
from rlhf.rollout.scheduler import Request


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
    ids_BT, keep_BT = pad_rows([answer.ids for answer in answers], pad_id=pad_id)
    logprobs_N = torch.tensor([x for answer in answers for x in answer.logprobs])
    logprobs_BT = torch.zeros(keep_BT.shape).masked_scatter(keep_BT, logprobs_N)
    ended_B = torch.tensor([answer.has_ended for answer in answers])
    ids_BT, keep_BT, ended_B, logprobs_BT = (
        copy_to_device(each, device) for each in (ids_BT, keep_BT, ended_B, logprobs_BT)
    )
    return Responses(ids_BT, keep_BT, ended_B, logprobs_BT)
