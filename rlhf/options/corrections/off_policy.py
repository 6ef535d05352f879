"""Importance weights for rollouts that another policy sampled.

The policy that sampled differs from the policy from which training starts a step (the proximal
policy): it is some steps older, or runs in another program or precision.
Shapes: B = sequences, T = response tokens.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from torch import Tensor

from rlhf.algorithms.ppo import MAX_LOG_RATIO

CorrectionLevel = Literal["token", "sequence", "geometric"]


class RolloutWeights(NamedTuple):
    """Importance weights (B, T) for the policy loss, without gradients; 1 at tokens not kept."""

    weights_BT: Tensor
    limited_BT: Tensor  # True where a limit truncated or rejected the token's weight


def rollout_weights(
    logprobs_BT: Tensor,
    sampled_logprobs_BT: Tensor,
    keep_BT: Tensor,
    *,
    level: CorrectionLevel,
    cap: float,
    masks: bool = False,
    floor: float = 0.0,
) -> RolloutWeights:
    """Return importance weights of the tokens, limited in one of two ways.

        token      w_t = p_t / p_sampled_t
        sequence   w   = product of all w_t of the response
        geometric  w   = (product of all w_t of the response) ^ (1 / tokens)

        truncate   min(w, cap)
        mask       w if floor <= w <= cap, otherwise 0

    Truncated token weights: https://fengyao.notion.site/off-policy-rl, after
    https://doi.org/10.1198/106186008X320456. Masked token weights with a ``floor``: IcePop,
    https://arxiv.org/abs/2510.18855 section 2.3.2. Weights and masks of sequences:
    https://richardli.xyz/rl-collapse.
    """
    log_ratio_BT = (logprobs_BT - sampled_logprobs_BT).masked_fill(~keep_BT, 0.0).detach()
    if level != "token":
        log_ratio_B = log_ratio_BT.sum(dim=1)
        if level == "geometric":
            log_ratio_B = log_ratio_B / keep_BT.sum(dim=1).clamp(min=1)
        log_ratio_BT = log_ratio_B[:, None].expand_as(keep_BT).masked_fill(~keep_BT, 0.0)
    weights_BT = log_ratio_BT.clamp(max=MAX_LOG_RATIO).exp()
    limited_BT = keep_BT & (weights_BT > cap)
    if masks:
        limited_BT = limited_BT | (keep_BT & (weights_BT < floor))
        return RolloutWeights(weights_BT.masked_fill(limited_BT, 0.0), limited_BT)
    return RolloutWeights(weights_BT.clamp(max=cap), limited_BT)


def off_policy_mask(
    logprobs_BT: Tensor,
    sampled_logprobs_BT: Tensor,
    advantages_BT: Tensor,
    keep_BT: Tensor,
    *,
    max_kl: float,
) -> Tensor:
    """Return True (B, T) at tokens to mask, https://arxiv.org/abs/2512.02556 eq. 9.

    A token is masked if its advantage is negative and the mean of log(p_sampled / p) over its
    response is above ``max_kl``: the policy hardly writes this response any more, so that pushing
    it further away teaches little and may destabilise.
    """
    log_ratio_BT = (sampled_logprobs_BT - logprobs_BT.detach()).masked_fill(~keep_BT, 0.0)
    kl_B = log_ratio_BT.sum(dim=1) / keep_BT.sum(dim=1).clamp(min=1)
    return (advantages_BT < 0) & (kl_B > max_kl)[:, None]


def sampled_units(keep_BT: Tensor, *, level: CorrectionLevel) -> Tensor:
    """Return a mask (B, T) that is True once for each independent weight of ``rollout_weights``.

    These are all kept tokens or, if all tokens of a response have one weight, the first of them.
    """
    return keep_BT if level == "token" else keep_BT & (keep_BT.cumsum(dim=1) == 1)
