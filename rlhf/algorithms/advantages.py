"""Rewards, advantages and returns of responses. Shapes: B = sequences, T = response tokens."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from rlhf.algorithms.masking import last_kept_index
from rlhf.base.metrics import Moments

MIN_DEVIATION = 1e-3  # scores with a smaller standard deviation are not divided


class Advantages(NamedTuple):
    """Advantages and returns (the targets of a critic); both are 0 at tokens that are not kept."""

    advantages_BT: Tensor
    returns_BT: Tensor


def scale_scores(scores_B: Tensor, moments: Moments, *, shift_mean: bool) -> Tensor:
    """Return scores (B,) divided by the standard deviation of ``moments``.

    With ``shift_mean`` the mean is subtracted first. Otherwise every score keeps its sign. If the
    deviation is below ``MIN_DEVIATION``, the scores count as equal and are not divided.
    """
    mean, variance = moments.mean.to(scores_B.dtype), moments.variance.to(scores_B.dtype)
    shifted_B = scores_B - mean if shift_mean else scores_B
    is_spread = variance > MIN_DEVIATION**2
    return shifted_B * torch.where(is_spread, torch.rsqrt(variance + 1e-8), 1.0)


def clip_scores(
    scores_B: Tensor,
    ended_B: Tensor,
    *,
    clip: float | None,
    missing_end_penalty: float,
    missing_end_score: float | None = None,
) -> Tensor:
    """Return scores clipped to [-clip, clip], minus a penalty for a response that never ended.

    The penalty comes after the clip, so that a high score cannot hide it. The response stays in
    the batch: dropping it would leave ranks with batches of different sizes. If
    ``missing_end_score`` is given, it is the score of a response that never ended, without penalty.
    """
    clipped_B = scores_B if clip is None else scores_B.clamp(-clip, clip)
    if missing_end_score is None:
        return clipped_B - missing_end_penalty * (~ended_B).to(scores_B.dtype)
    return clipped_B.masked_fill(~ended_B, missing_end_score)


def token_rewards(kl_BT: Tensor, scores_B: Tensor, keep_BT: Tensor, *, kl_ctl: float) -> Tensor:
    """Return rewards per token (B, T): -kl_ctl * KL_t, plus the score at the last kept token.

    https://arxiv.org/abs/2203.02155 eq. 2, without the pretraining term. Cells not kept are 0.
    """
    rewards_BT = (-kl_ctl * kl_BT).masked_fill(~keep_BT, 0.0)
    return rewards_BT.scatter_add(1, last_kept_index(keep_BT)[:, None], scores_B[:, None])


def gae(
    rewards_BT: Tensor,
    values_BT: Tensor,
    keep_BT: Tensor,
    *,
    gamma: float,
    lam: float | Tensor,
    last_values_B: Tensor | None = None,
) -> Advantages:
    """Compute generalised advantage estimates, https://arxiv.org/abs/1506.02438 eq. 16.

        delta_t = r_t + gamma * V_{t+1} - V_t
        A_t     = delta_t + gamma * lam * A_{t+1}
        R_t     = A_t + V_t

    V_t is the value before token t is chosen, and t + 1 is the next *kept* token: other tokens,
    such as an observation between two turns, are skipped. After the last kept token V is
    ``last_values_B``; without this argument V is 0, as if a response that reaches the length limit
    had finished. ``lam`` is one number, or one per response (B,).
    """
    kept_values_BT = values_BT.masked_fill(~keep_BT, 0.0)
    next_advantage_B = torch.zeros_like(kept_values_BT[:, 0])
    next_value_B = torch.zeros_like(next_advantage_B) if last_values_B is None else last_values_B
    columns: list[Tensor] = []
    for t in reversed(range(values_BT.shape[1])):
        keep_B = keep_BT[:, t]
        delta_B = rewards_BT[:, t] + gamma * next_value_B - kept_values_BT[:, t]
        advantage_B = delta_B + gamma * lam * next_advantage_B
        next_advantage_B = torch.where(keep_B, advantage_B, next_advantage_B)
        next_value_B = torch.where(keep_B, kept_values_BT[:, t], next_value_B)
        columns.append(next_advantage_B)
    advantages_BT = torch.stack(columns[::-1], dim=1).masked_fill(~keep_BT, 0.0)
    return Advantages(advantages_BT, advantages_BT + kept_values_BT)


def length_adaptive_lam(keep_BT: Tensor, *, alpha: float) -> Tensor:
    """Return VAPO's lambda (B,) of each response, https://arxiv.org/abs/2504.05118 section 4.2.

    lam = 1 - 1 / (alpha * tokens), so that the TD errors' coefficients sum to about alpha * tokens.
    Responses of fewer than 1 / alpha tokens, for which the formula is negative, have lambda 0.
    """
    return (1.0 - 1.0 / (alpha * keep_BT.sum(dim=1).clamp(min=1))).clamp(min=0.0)


def rloo_advantages(rewards_BT: Tensor, keep_BT: Tensor, *, group_size: int) -> Advantages:
    """Compute advantages with a leave-one-out baseline (RLOO), https://arxiv.org/abs/2402.14740.

    R_i is the sum of a response's token rewards. The advantage of all its tokens is R_i minus the
    mean R of the other responses to its prompt. The rows of one prompt must be adjacent.
    """
    totals_GK = _group_totals(rewards_BT, keep_BT, group_size)
    others_GK = (totals_GK.sum(dim=1, keepdim=True) - totals_GK) / (group_size - 1)
    return _broadcast_to_tokens(totals_GK - others_GK, rewards_BT, keep_BT)


def grpo_advantages(
    rewards_BT: Tensor, keep_BT: Tensor, *, group_size: int, divides: bool = True
) -> Advantages:
    """Compute GRPO advantages from outcomes, https://arxiv.org/abs/2402.03300 section 4.1.2.

    R_i is the sum of a response's token rewards; the advantage of all its tokens is R_i as
    ``normalise_in_groups`` returns it. The rows of one prompt must be adjacent.
    Without ``divides`` the advantage is R_i - mean (Dr. GRPO, https://arxiv.org/abs/2503.20783).
    """
    totals_GK = _group_totals(rewards_BT, keep_BT, group_size)
    advantages_GK = normalise_in_groups(totals_GK, divides=divides)
    return _broadcast_to_tokens(advantages_GK, rewards_BT, keep_BT)


def normalise_in_groups(totals_GK: Tensor, *, divides: bool = True) -> Tensor:
    """Return (total - mean) / (std + 1e-6) over dimension 1, the responses to a prompt.

    GRPO's paper does not define std; this is the sample deviation (divisor: responses - 1), as in
    the usual implementations, so that their learning rates carry over. Without ``divides`` only the
    mean is subtracted. Each index of a third dimension is normalised separately.
    """
    centred_GK = totals_GK - totals_GK.mean(dim=1, keepdim=True)
    return centred_GK / (totals_GK.std(dim=1, keepdim=True) + 1e-6) if divides else centred_GK


def reinforce_pp_advantages(rewards_BT: Tensor, keep_BT: Tensor, *, gamma: float) -> Advantages:
    """Compute REINFORCE++ advantages, https://arxiv.org/abs/2501.03262: discounted rewards-to-go.

    There is no baseline. The method requires that the caller applies ``whiten`` to the advantages
    of the whole rollout.
    """
    return gae(rewards_BT, torch.zeros_like(rewards_BT), keep_BT, gamma=gamma, lam=1.0)


def _group_totals(rewards_BT: Tensor, keep_BT: Tensor, group_size: int) -> Tensor:
    """Return the summed rewards (prompts, group_size) of all responses, one prompt per row."""
    rows = len(rewards_BT)
    if group_size <= 1 or rows % group_size:
        raise ValueError(f"{rows} rows do not divide into groups of {group_size}, of 2 or more")
    # Sum in fp64: if all totals are equal, GRPO would divide fp32's rounding error by almost 0.
    totals_B = rewards_BT.masked_fill(~keep_BT, 0.0).double().sum(dim=1)
    return totals_B.view(-1, group_size)


def _broadcast_to_tokens(advantages_GK: Tensor, rewards_BT: Tensor, keep_BT: Tensor) -> Advantages:
    """Copy each response's advantage to its kept tokens; returns are undiscounted rewards-to-go."""
    advantages_B1 = advantages_GK.reshape(-1, 1).to(rewards_BT.dtype)
    advantages_BT = advantages_B1.expand_as(rewards_BT).masked_fill(~keep_BT, 0.0)
    return Advantages(
        advantages_BT, reinforce_pp_advantages(rewards_BT, keep_BT, gamma=1.0).returns_BT
    )
