"""Reuse of the log-probabilities that the rollout backend measured while it sampled.

Shapes: B = sequences of this rank, T = response tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from rlhf.base.errors import ConfigError
from rlhf.base.metrics import Maximum, Mean, Metrics
from rlhf.base.types import Responses, Rollout
from rlhf.config.choices import When
from rlhf.config.schema.ppo import PpoConfig, ProximalPolicy, RolloutCorrection
from rlhf.config.schema.rollout import RolloutConfig

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
        """Return True if the actor need not be run to score ``responses``.

        Raises:
            ConfigError: if reuse_logprobs is ``always`` and the backend measures none.
        """
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
    """Return metrics of the difference of two measurements of the same log-probabilities.

    The metrics are the mean and the largest difference, and the share of differences above
    ``LARGE``.
    """
    apart_BT = (one_BT - other_BT).abs()
    return {
        MISMATCH: Mean.of(apart_BT, keep_BT),
        f"{MISMATCH}_share": Mean.of((apart_BT > LARGE).float(), keep_BT),
        f"{MISMATCH}_max": Maximum.of(apart_BT, keep_BT),
    }
