"""Kullback-Leibler divergence: estimators from samples, and a controller of the penalty."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal, Self

from torch import Tensor

KlEstimatorName = Literal["k1", "k2", "k3", "k3_ratio"]


def estimate_kl(
    logprobs: Tensor,
    other_logprobs: Tensor,
    *,
    estimator: KlEstimatorName,
    sampled_logprobs: Tensor | None = None,
) -> Tensor:
    """Estimate KL(p || other) per token, in nats, from tokens sampled from p.

    http://joschu.net/blog/kl-approx.html, with d = log p - log other:

        k1 = d                    unbiased, may be negative
        k2 = d^2 / 2              biased, low variance
        k3 = exp(-d) - 1 + d      unbiased, never negative
        k3_ratio = k3 * p / p_sampled

    In a loss, k3_ratio has the gradient of KL(p || other) even if p has changed since it sampled,
    because its weight p / p_sampled has a gradient: https://arxiv.org/abs/2512.02556 section 3.1.
    Without ``sampled_logprobs`` (log p_sampled), p_sampled is p, and the value of the weight is 1.
    """
    difference = logprobs - other_logprobs
    match estimator:
        case "k1":
            return difference
        case "k2":
            return difference.square() / 2
        case "k3":
            # expm1, because exp(x) - 1 rounds small differences away: k3 could become negative.
            return (-difference).expm1() + difference
        case "k3_ratio":
            sampled = logprobs if sampled_logprobs is None else sampled_logprobs
            k3 = estimate_kl(logprobs, other_logprobs, estimator="k3")
            return (logprobs - sampled.detach()).exp() * k3


@dataclass(frozen=True, slots=True)
class KlController:
    """A KL coefficient, fixed or adapted to a target KL, https://arxiv.org/abs/1909.08593 eq. 4.

        error        = clip(KL / target - 1, -0.2, 0.2)
        coefficient *= 1 + error * sequences / horizon

    KL and target are in nats per sequence, over response tokens only.
    """

    coefficient: float
    target: float | None
    horizon: int

    def adapt_to_kl(self, kl_per_sequence: float, *, num_sequences: int) -> Self:
        """Return the controller after a rollout of ``num_sequences`` with mean ``kl_per_sequence``.

        If the KL is NaN, the coefficient does not change: otherwise it would stay NaN.
        """
        if self.target is None or math.isnan(kl_per_sequence):
            return self
        error = min(max(kl_per_sequence / self.target - 1.0, -0.2), 0.2)
        factor = 1.0 + error * num_sequences / self.horizon
        return replace(self, coefficient=self.coefficient * factor)


def adapt_lr_scale(scale: float, approx_kl: float, *, limit: float) -> float:
    """Return the learning-rate scale after an update that moved the policy by ``approx_kl`` nats.

    Above ``limit`` the scale is divided by 1.5, to no less than 1e-3; below half the limit it is
    multiplied by 1.5, to no more than 1. This applies the adaptive KL penalty of
    https://arxiv.org/abs/1707.06347 section 4 to the learning rate; the paper changes its penalty
    by a factor of 2, outside of [target / 1.5, target * 1.5].
    """
    if approx_kl > limit:
        return max(1e-3, scale / 1.5)
    if approx_kl < limit / 2:
        return min(1.0, scale * 1.5)
    return scale
