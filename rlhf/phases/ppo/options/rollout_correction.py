"""ppo.rollout_correction: importance weights of a rollout that another policy sampled.

A rollout has two kinds of log-probabilities: ``rollout.responses.logprobs_BT`` of the policy that
sampled, and ``rollout.logprobs_BT`` of the proximal policy, which the updates start from. Both are
the same if log-probabilities are reused. Shapes: B = sequences of this rank, T = response tokens.
"""

from __future__ import annotations

from dataclasses import replace
from typing import cast

import torch
from torch import Tensor

from rlhf.algorithms.off_policy import CorrectionLevel, RolloutWeights, rollout_weights
from rlhf.base.metrics import Mean, Metrics, Minimum, Moments
from rlhf.base.random_streams import random_stream
from rlhf.base.types import Rollout
from rlhf.config.schema.ppo import CorrectionMode, PpoConfig, ProximalPolicy, RolloutCorrection


def step_weights(
    config: PpoConfig, rollout: Rollout, *, seed: int, rank: int
) -> RolloutWeights | None:
    """Return the weights that all updates of a step share; None without such weights.

    The random numbers of ppo.rollout_correction_control are keyed by step and rank.
    """
    sampled_BT = rollout.responses.logprobs_BT
    is_shared = config.proximal_policy is ProximalPolicy.step_start
    if config.rollout_correction is RolloutCorrection.none or sampled_BT is None or not is_shared:
        return None
    shuffle = None
    if config.rollout_correction_control:
        shuffle = random_stream(seed, "correction_control", str(rollout.prompts.step), rank)
    return weights_of(config, rollout.logprobs_BT, sampled_BT, rollout.responses.keep_BT, shuffle)


def weights_of(
    config: PpoConfig,
    logprobs_BT: Tensor,
    sampled_BT: Tensor,
    keep_BT: Tensor,
    shuffle: torch.Generator | None = None,
) -> RolloutWeights:
    """Return the weights between the proximal policy and the policy that sampled."""
    return rollout_weights(
        logprobs_BT,
        sampled_BT,
        keep_BT,
        level=cast(CorrectionLevel, config.rollout_correction.value),
        cap=config.rollout_correction_cap,
        masks=config.rollout_correction_mode is CorrectionMode.mask,
        floor=config.rollout_correction_floor,
        shuffle=shuffle,
    )


def with_proximal_share(config: PpoConfig, *, lag: int, steps_done: int) -> PpoConfig:
    """Return ``config`` with A-3PO's share of the sampler, if it is null, for the coming step.

    It is 1 / d, and 1 if d is 0, where d is the number of steps since the weights that sampled:
    https://arxiv.org/abs/2512.06547.
    """
    if config.proximal_share is not None:
        return config
    return replace(config, proximal_share=1.0 / max(1, min(lag, steps_done)))


def correction_metrics(weights: RolloutWeights, keep_BT: Tensor) -> Metrics:
    """Return metrics of the weights of response tokens."""
    return {
        "ppo/rollout_weight": Mean.of(weights.weights_BT, keep_BT),
        "ppo/rollout_weight_min": Minimum.of(weights.weights_BT, keep_BT),
        "ppo/rollout_limited_share": Mean.of(weights.limited_BT, keep_BT),
        "rollout_weights": Moments.of(weights.weights_BT, keep_BT),  # for the sample size
    }
