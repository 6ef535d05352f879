"""Whether PPO learns from the log-probabilities that a rollout measured as it sampled.

Shapes: B = sequences of this rank, T = response tokens.
"""

from __future__ import annotations

from torch import Tensor

from rlhf.config.choices import When
from rlhf.config.ppo_schema import RolloutConfig
from rlhf.errors import ConfigError
from rlhf.metrics import Maximum, Mean, Metrics
from rlhf.types import Responses, Rollout

MISMATCH = "ppo/logprob_mismatch"  # mean |rollout's - training's| per token, of the same weights
LARGE = 0.1  # nats; a token whose ratio is off by more than a tenth


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


def mismatch(rollout: Rollout, change: Metrics) -> Metrics:
    """How far rollout and training are apart, from what there is: nothing is run for it.

    Recomputed log-probabilities are compared themselves. In place of reused ones stand those of
    the first update, whose forward pass ran before any weight had changed: ``change`` is what
    ``differences`` says of them, nothing where the actor took no part in it.
    """
    measured_BT = rollout.responses.logprobs_BT
    if measured_BT is None:
        return {}
    if rollout.logprobs_BT is measured_BT:
        return change
    return differences(measured_BT, rollout.logprobs_BT, rollout.responses.keep_BT)


def differences(one_BT: Tensor, other_BT: Tensor, keep_BT: Tensor) -> Metrics:
    """How far two readings of the same tokens are apart: mean, share of large ones, the largest."""
    apart_BT = (one_BT - other_BT).abs()
    return {
        MISMATCH: Mean.of(apart_BT, keep_BT),
        f"{MISMATCH}_share": Mean.of((apart_BT > LARGE).float(), keep_BT),
        f"{MISMATCH}_max": Maximum.of(apart_BT, keep_BT),
    }
