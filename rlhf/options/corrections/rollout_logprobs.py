"""The log-probabilities of a rollout: reused or recomputed, and weights between two policies.

A rollout has two kinds of log-probabilities: ``rollout.responses.logprobs_BT`` of the policy that
sampled, and ``rollout.logprobs_BT`` of the proximal policy, which the updates start from. Both are
the same if log-probabilities are reused; ppo.rollout_correction weighs tokens by their ratio.
Shapes: B = sequences of this rank, T = response tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import cast

import torch
from torch import Tensor

from rlhf.base.errors import ConfigError
from rlhf.base.metrics import Maximum, Mean, Metrics, Minimum, Moments
from rlhf.base.random_streams import random_stream
from rlhf.base.types import Responses, Rollout
from rlhf.config.choices import When
from rlhf.options import PpoConfig, RolloutConfig
from rlhf.options.corrections.keys import CorrectionMode, ProximalPolicy, RolloutCorrection
from rlhf.options.corrections.off_policy import CorrectionLevel, RolloutWeights, rollout_weights

MISMATCH = "ppo/logprob_mismatch"  # mean |rollout - training| per token, with the same weights
LARGE = 0.1  # nats; the ratio of such a token is off by more than a tenth


class LogprobReuse:
    """The decision for each step whether log-probabilities are reused; equal on every rank.

    With reuse_logprobs=auto:

    - ppo.rollout_correction needs the log-probabilities of two policies: they are recomputed,
      unless the proximal policy is interpolated, which replaces the second.
    - Otherwise, with rollout.lag, they are reused: they belong to the policy that sampled, which
      PPO's ratio compares with.
    - Otherwise they are reused as long as the last measured mismatch, over all ranks, is small
      enough, and never under dropout, because training then cannot measure a mismatch.
    """

    def __init__(self, config: RolloutConfig, ppo: PpoConfig) -> None:
        self._config = config
        self._mode = _mode_of_run(config, ppo)
        self.mismatch: float | None = None  # not measured yet

    def can_reuse(self, responses: Responses) -> bool:
        """Return True if the actor need not be run to score ``responses``."""
        config = self._config
        if responses.logprobs_BT is None and self._mode is When.always:
            raise ConfigError(
                f"rollout.reuse_logprobs=always: rollout.backend={config.backend} measures no "
                "log-probabilities; use rollout.reuse_logprobs=auto"
            )
        if self._mode is not When.auto:
            return self._mode is When.always
        if responses.logprobs_BT is None or self.mismatch is None:
            return False
        return self.mismatch <= config.max_logprob_mismatch

    def is_measured(self, rollout: Rollout, updates: Sequence[object]) -> bool:
        """Return True if training can now measure the mismatch of reused log-probabilities.

        It cannot after an update, nor with a lag: then they are those of an older policy.
        """
        return rollout.reuses_logprobs and not updates and not self._config.lag

    def recomputed_mismatch(self, rollout: Rollout) -> Metrics:
        """Return the mismatch of log-probabilities that were measured and recomputed.

        With a lag two policies would be compared; ppo/rollout_weight does that.
        """
        measured_BT = rollout.responses.logprobs_BT
        if measured_BT is None or rollout.reuses_logprobs or self._config.lag:
            return {}
        return logprob_mismatch(measured_BT, rollout.logprobs_BT, rollout.responses.keep_BT)

    def store_mismatch(self, values: Mapping[str, float]) -> None:
        """Store the mismatch of a step from its metrics over all ranks, if it was measured."""
        self.mismatch = values.get(MISMATCH, self.mismatch)


def _mode_of_run(config: RolloutConfig, ppo: PpoConfig) -> When:
    """Return the configured mode; of auto, what does not depend on a measured mismatch."""
    if config.reuse_logprobs is not When.auto:
        return config.reuse_logprobs
    if ppo.rollout_correction is not RolloutCorrection.none:
        is_interpolated = ppo.proximal_policy is ProximalPolicy.interpolated
        return When.always if is_interpolated else When.never
    if config.lag:
        return When.always
    return When.never if ppo.actor_dropout else When.auto


def logprob_mismatch(one_BT: Tensor, other_BT: Tensor, keep_BT: Tensor) -> Metrics:
    """Return metrics of the difference of two measurements of the same log-probabilities."""
    apart_BT = (one_BT - other_BT).abs()
    return {
        MISMATCH: Mean.of(apart_BT, keep_BT),
        f"{MISMATCH}_share": Mean.of((apart_BT > LARGE).float(), keep_BT),
        f"{MISMATCH}_max": Maximum.of(apart_BT, keep_BT),
    }


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
