"""PPO's policy and value losses for response batches. Shapes: B = sequences, T = response tokens.

A loss here is a *sum* over kept tokens, or over the token means of sequences: the caller divides by
the number of tokens, or sequences, in the whole mini-batch, so that the split into micro-batches
and ranks does not change the gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from rlhf.algorithms.kl import estimate_kl
from rlhf.algorithms.masking import masked_sum
from rlhf.base.metrics import Maximum, Mean

# In nats. exp(20) = 5e8 is far beyond any clip range. Above 88.7 nats a ratio in fp32 is infinite,
# and the clip multiplies its infinite gradient by 0, which gives NaN.
MAX_LOG_RATIO = 20.0
MAX_DPPO_RATIO = 20.0  # as in verl (clip_ratio_c); https://arxiv.org/abs/2602.04879 section 5.4


class PolicyLoss(NamedTuple):
    """The actor's surrogate loss, which limits the change of the policy, and diagnostics."""

    loss: Tensor  # scalar, differentiable
    actor_loss: Mean  # loss per token
    clipfrac: Mean  # share of tokens at which the clip, or a mask, takes effect
    dual_clipfrac: Mean  # share of tokens whose loss is bounded by the dual clip
    approx_kl: Mean  # k3 estimate of KL(old || new), nats per token
    ratio_mean: Mean
    ratio_max: Maximum


class ValueLoss(NamedTuple):
    """The critic's loss, half the squared error, and the effect of its clip."""

    loss: Tensor  # scalar sum over kept tokens, differentiable
    critic_loss: Mean  # loss per token
    value_clipfrac: Mean  # share of tokens whose clipped error is larger than the plain one


def policy_loss(
    logprobs_BT: Tensor,
    old_logprobs_BT: Tensor,
    advantages_BT: Tensor,
    keep_BT: Tensor,
    *,
    cliprange: float,
    cliprange_high: float | None = None,
    dual_clip: float | None = None,
    total: Callable[[Tensor, Tensor], Tensor] = masked_sum,
) -> PolicyLoss:
    """Compute the clipped surrogate objective, https://arxiv.org/abs/1707.06347 eq. 7, as a loss.

    ratio = exp(log pi - log pi_old)
    loss  = max(-A * ratio, -A * clip(ratio, 1 - cliprange, 1 + cliprange))

    ``cliprange_high`` replaces cliprange in the upper limit, https://arxiv.org/abs/2503.14476 eq.
    10. With ``dual_clip``, which should be above 1, the loss is at most -dual_clip * A if A < 0,
    https://arxiv.org/abs/1912.09729 eq. 5. Log-ratios are clamped to 20 nats, beyond which a token
    has no gradient. ``total`` reduces the token losses to a scalar: ``masked_sum``, or
    ``sum_of_row_means`` for https://arxiv.org/abs/2402.03300 eq. 3.
    """
    log_ratio_BT = log_ratio(logprobs_BT, old_logprobs_BT, keep_BT)
    ratio_BT = log_ratio_BT.exp()
    plain_BT = -advantages_BT * ratio_BT
    high = cliprange if cliprange_high is None else cliprange_high
    clipped_BT = -advantages_BT * ratio_BT.clamp(1 - cliprange, 1 + high)
    loss_BT = plain_BT.maximum(clipped_BT)
    bound_BT = torch.full_like(loss_BT, torch.inf)
    if dual_clip is not None:
        bound_BT = bound_BT.where(advantages_BT >= 0, -dual_clip * advantages_BT)
    dual_BT = loss_BT > bound_BT
    loss_BT = loss_BT.minimum(bound_BT)
    return PolicyLoss(
        loss=total(loss_BT, keep_BT),
        actor_loss=Mean.of(loss_BT, keep_BT),
        clipfrac=Mean.of((clipped_BT > plain_BT).float(), keep_BT),
        dual_clipfrac=Mean.of(dual_BT.float(), keep_BT),
        approx_kl=_approx_kl(log_ratio_BT, keep_BT),
        ratio_mean=Mean.of(ratio_BT, keep_BT),
        ratio_max=Maximum.of(ratio_BT, keep_BT),
    )


def gspo_loss(
    logprobs_BT: Tensor,
    old_logprobs_BT: Tensor,
    advantages_BT: Tensor,
    keep_BT: Tensor,
    *,
    cliprange: float,
    cliprange_high: float | None = None,
    total: Callable[[Tensor, Tensor], Tensor] = masked_sum,
) -> PolicyLoss:
    """Compute the clipped surrogate of GSPO-token, https://arxiv.org/abs/2507.18071 eq. 13 and 14.

        s       = exp(mean over the response's tokens of log pi - log pi_old)
        ratio_t = sg(s) * pi_t / sg(pi_t)          sg: without gradient

    Each token has the ratio of its whole response. If all tokens of a response have the same
    advantage, the loss and its gradient equal those of GSPO (eq. 5 and 7).
    """
    log_ratio_BT = log_ratio(logprobs_BT, old_logprobs_BT, keep_BT)
    mean_B1 = log_ratio_BT.sum(dim=1, keepdim=True) / keep_BT.sum(dim=1, keepdim=True).clamp(min=1)
    shared_BT = mean_B1.detach() + log_ratio_BT - log_ratio_BT.detach()
    loss = policy_loss(
        shared_BT,
        torch.zeros_like(shared_BT),
        advantages_BT,
        keep_BT,
        cliprange=cliprange,
        cliprange_high=cliprange_high,
        total=total,
    )
    return loss._replace(approx_kl=_approx_kl(log_ratio_BT, keep_BT))


def cispo_loss(
    logprobs_BT: Tensor,
    old_logprobs_BT: Tensor,
    advantages_BT: Tensor,
    keep_BT: Tensor,
    *,
    cliprange_high: float,
    total: Callable[[Tensor, Tensor], Tensor] = masked_sum,
) -> PolicyLoss:
    """Compute CISPO's loss, https://arxiv.org/abs/2506.13585 eq. 4 and 5.

    loss = -sg(min(ratio, 1 + cliprange_high)) * A * log pi          sg: without gradient

    The ratio is a weight that the clip limits; every token keeps a gradient. As in the paper's
    experiments, there is no lower limit.
    """
    log_ratio_BT = log_ratio(logprobs_BT, old_logprobs_BT, keep_BT)
    ratio_BT = log_ratio_BT.detach().exp()
    weights_BT = ratio_BT.clamp(max=1 + cliprange_high)
    loss_BT = -weights_BT * advantages_BT * logprobs_BT.masked_fill(~keep_BT, 0.0)
    return limited_loss(loss_BT, log_ratio_BT, ratio_BT > weights_BT, keep_BT, total)


def dppo_loss(
    logprobs_BT: Tensor,
    old_logprobs_BT: Tensor,
    advantages_BT: Tensor,
    keep_BT: Tensor,
    sampled_logprobs_BT: Tensor | None = None,
    *,
    divergence: Literal["tv", "kl"],
    limits: tuple[float, float],
    total: Callable[[Tensor, Tensor], Tensor] = masked_sum,
) -> PolicyLoss:
    """Compute DPPO's loss, https://arxiv.org/abs/2602.04879, with its binary divergences.

        loss = 0 if D > limit and p has moved in the direction of A,
               otherwise -sg(min(ratio, MAX_DPPO_RATIO)) * A * log pi     sg: without gradient
        tv   D = |p - p_sampled|
        kl   D = p_sampled * log(p_sampled / p) + (1 - p_sampled) * log((1 - p_sampled) / (1 - p))

    p and p_sampled are the token's probabilities: D compares the token with all others together
    (eq. 13 and 14). ``limits`` are for A < 0 and A > 0. Unlike a ratio, D is small for a rare token
    whose probability has doubled, and large for a frequent token that loses a fifth. Without
    ``sampled_logprobs_BT`` the old policy sampled.
    """
    sampled_BT = old_logprobs_BT if sampled_logprobs_BT is None else sampled_logprobs_BT
    # At most -1e-7, so that 1 - p is above 0; masked cells get this value on both sides.
    sides = (sampled_BT, logprobs_BT.detach())
    old_BT, new_BT = (side_BT.masked_fill(~keep_BT, 0.0).clamp(max=-1e-7) for side_BT in sides)
    moved_BT, divergence_BT = new_BT - old_BT, (new_BT.exp() - old_BT.exp()).abs()
    if divergence == "kl":
        old_others_BT, others_BT = -old_BT.expm1(), -new_BT.expm1()
        others_term_BT = old_others_BT * (old_others_BT / others_BT).log()
        divergence_BT = others_term_BT - old_BT.exp() * moved_BT
    low, high = limits
    is_beyond_BT = (divergence_BT > high).where(advantages_BT > 0, divergence_BT > low)
    log_ratio_BT = log_ratio(logprobs_BT, old_logprobs_BT, keep_BT)
    ratio_BT = log_ratio_BT.detach().exp()
    masked_BT = is_beyond_BT & (moved_BT * advantages_BT > 0)
    weights_BT = ratio_BT.clamp(max=MAX_DPPO_RATIO).masked_fill(masked_BT, 0.0)
    loss_BT = -weights_BT * advantages_BT * logprobs_BT.masked_fill(~keep_BT, 0.0)
    return limited_loss(loss_BT, log_ratio_BT, ratio_BT > weights_BT, keep_BT, total)


def limited_loss(
    loss_BT: Tensor,
    log_ratio_BT: Tensor,
    limited_BT: Tensor,
    keep_BT: Tensor,
    total: Callable[[Tensor, Tensor], Tensor],
) -> PolicyLoss:
    """Return the loss and its metrics; ``limited_BT`` marks tokens at which the limit applies."""
    ratio_BT = log_ratio_BT.detach().exp()
    return PolicyLoss(
        loss=total(loss_BT, keep_BT),
        actor_loss=Mean.of(loss_BT, keep_BT),
        clipfrac=Mean.of(limited_BT.float(), keep_BT),
        dual_clipfrac=Mean.of(torch.zeros_like(ratio_BT), keep_BT),
        approx_kl=_approx_kl(log_ratio_BT, keep_BT),
        ratio_mean=Mean.of(ratio_BT, keep_BT),
        ratio_max=Maximum.of(ratio_BT, keep_BT),
    )


def log_ratio(logprobs_BT: Tensor, old_logprobs_BT: Tensor, keep_BT: Tensor) -> Tensor:
    """Return log pi - log pi_old, clamped to +-MAX_LOG_RATIO.

    The result is 0 in masked cells, so that their log-probs cannot overflow into the gradient.
    """
    log_ratio_BT = (logprobs_BT - old_logprobs_BT).masked_fill(~keep_BT, 0.0)
    return log_ratio_BT.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def _approx_kl(log_ratio_BT: Tensor, keep_BT: Tensor) -> Mean:
    """Return the k3 estimate of KL(old || new) from clamped log-ratios."""
    zeros_BT = torch.zeros_like(log_ratio_BT)  # k3 needs only the difference: one side can be 0
    return Mean.of(estimate_kl(zeros_BT, log_ratio_BT.detach(), estimator="k3"), keep_BT)


def value_loss(
    values_BT: Tensor,
    old_values_BT: Tensor,
    returns_BT: Tensor,
    keep_BT: Tensor,
    *,
    cliprange_value: float | None,
) -> ValueLoss:
    """Compute half the squared error; with a clip range, the larger of plain and clipped error.

    clipped = clip(V, V_old - cliprange_value, V_old + cliprange_value)
    loss    = 0.5 * max((V - R)^2, (clipped - R)^2)

    The clip follows https://github.com/openai/baselines/tree/master/baselines/ppo2.
    """
    # 0 in masked cells before the square: an infinity there would give a gradient of NaN.
    plain_BT = (values_BT - returns_BT).masked_fill(~keep_BT, 0.0).square()
    if cliprange_value is None:
        clipped_BT = plain_BT
    else:
        held_BT = values_BT.clamp(old_values_BT - cliprange_value, old_values_BT + cliprange_value)
        clipped_BT = (held_BT - returns_BT).masked_fill(~keep_BT, 0.0).square()
    loss_BT = 0.5 * plain_BT.maximum(clipped_BT)
    return ValueLoss(
        loss=masked_sum(loss_BT, keep_BT),
        critic_loss=Mean.of(loss_BT, keep_BT),
        value_clipfrac=Mean.of((clipped_BT > plain_BT).float(), keep_BT),
    )
