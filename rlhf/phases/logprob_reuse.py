"""Whether PPO learns from the log-probabilities that a rollout measured as it sampled.

Shapes: B = sequences of this rank, T = response tokens.
"""

from __future__ import annotations

from rlhf.config.choices import When
from rlhf.config.ppo_schema import RolloutConfig
from rlhf.errors import ConfigError
from rlhf.metrics import Mean, Metric, Metrics
from rlhf.types import Responses, Rollout

MISMATCH = "ppo/logprob_mismatch"  # mean |rollout's - training's| per token, of the same weights


class LogprobReuse:
    """Decides for a step what the old log-probabilities are; the same on every rank.

    With auto they are the rollout's own for as long as the last mismatch that was measured, over
    all ranks, is small enough. Under dropout none can be measured in training, and they are not.
    """

    def __init__(self, config: RolloutConfig, *, actor_dropout: float) -> None:
        self._config = config
        self._has_dropout = actor_dropout > 0
        self._mismatch: float | None = None  # not measured yet

    def decide(self, responses: Responses) -> bool:
        """True where the actor need not be run to score ``responses``.

        Raises:
            ConfigError: always, and the backend measures nothing.
        """
        config = self._config
        if responses.logprobs_BT is None and config.reuse_logprobs is When.always:
            raise ConfigError(
                f"rollout.reuse_logprobs=always: rollout.backend={config.backend} measures no "
                "log-probabilities; use rollout.reuse_logprobs=auto"
            )
        if config.reuse_logprobs is not When.auto:
            return config.reuse_logprobs is When.always
        if responses.logprobs_BT is None or self._has_dropout or self._mismatch is None:
            return False
        return self._mismatch <= config.max_logprob_mismatch

    def measured(self, values: dict[str, float]) -> None:
        """Remember the mismatch among a step's values over all ranks, where there is one."""
        self._mismatch = values.get(MISMATCH, self._mismatch)


def mismatch(rollout: Rollout, change: Metric | None) -> Metrics:
    """How far rollout and training are apart, from what there is: nothing is run for it.

    Recomputed log-probabilities are compared themselves. In place of reused ones stand those of
    the first update, whose forward pass ran before any weight had changed: ``change`` is its mean
    |new - old|, None where the actor took no part in it.
    """
    measured_BT = rollout.responses.logprobs_BT
    if measured_BT is None:
        return {}
    if rollout.logprobs_BT is measured_BT:
        return {} if change is None else {MISMATCH: change}
    differences_BT = (measured_BT - rollout.logprobs_BT).abs()
    return {MISMATCH: Mean.of(differences_BT, rollout.responses.keep_BT)}
