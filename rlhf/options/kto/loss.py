"""The loss of KTO, and the mismatched responses of its reference point. Shapes: B = responses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rlhf.base.metrics import Mean


class KtoLoss(NamedTuple):
    """The loss of KTO, and means of the implicit rewards, beta * log(pi / pi_ref)."""

    loss: Tensor  # scalar sum over responses, differentiable
    mean_loss: Mean
    chosen_reward: Mean  # of good responses
    rejected_reward: Mean  # of bad responses


def kto_loss(
    log_ratios_B: Tensor,
    is_good_B: Tensor,
    *,
    reference_point: float,
    beta: float,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> KtoLoss:
    """Compute the loss of marked responses, https://arxiv.org/abs/2402.01306, section 4.1.

    good  loss = desirable_weight   * (1 - sigmoid(beta * (log_ratio - reference_point)))
    bad   loss = undesirable_weight * (1 - sigmoid(beta * (reference_point - log_ratio)))

    Args:
        log_ratios_B: log(pi / pi_ref) of whole responses.
        is_good_B: bool; True where the response is marked as good.
        reference_point: estimate of KL(pi || pi_ref) in nats, at least 0; it has no gradient.
    """
    gains_B = torch.where(is_good_B, 1.0, -1.0) * (log_ratios_B - reference_point)
    weights_B = torch.where(is_good_B, desirable_weight, undesirable_weight)
    losses_B = weights_B * torch.sigmoid(-beta * gains_B)
    rewards_B = beta * log_ratios_B
    return KtoLoss(
        loss=losses_B.sum(),
        mean_loss=Mean.of(losses_B),
        chosen_reward=Mean.of(rewards_B, is_good_B),
        rejected_reward=Mean.of(rewards_B, ~is_good_B),
    )


def mismatch_responses(
    rows: Mapping[str, Sequence[Any]], *, max_tokens: int
) -> dict[str, list[Any]]:
    """Return ``rows``, tokenised responses, with the response of the next row after each prompt.

    The last prompt gets the first response (section 4.1, the estimate of z_0). A response that
    would end after ``max_tokens`` is cut there.
    """
    responses = [ids[start:] for ids, start in zip(rows["ids"], rows["prompt_tokens"], strict=True)]
    prompts = [ids[:start] for ids, start in zip(rows["ids"], rows["prompt_tokens"], strict=True)]
    others = [*responses[1:], *responses[:1]]
    found = [[*prompt, *other][:max_tokens] for prompt, other in zip(prompts, others, strict=True)]
    return {
        "ids": found,
        "prompt_tokens": list(rows["prompt_tokens"]),
        "length": [len(ids) for ids in found],
    }
