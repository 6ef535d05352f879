"""The log-probabilities of a rollout: reused from sampling, or recomputed by the trainer.

A rollout has two kinds of log-probabilities: ``rollout.responses.logprobs_BT`` of the policy that
sampled (None if the backend measures none), and ``rollout.logprobs_BT`` of the proximal policy,
which the updates start from. Both are equal if log-probabilities are reused.
Shapes: B = sequences of this rank, T = response tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor, nn

from rlhf.base.errors import ConfigError
from rlhf.base.metrics import Maximum, Mean, Metrics
from rlhf.base.types import Responses, Rollout
from rlhf.config.choices import When
from rlhf.options import PpoConfig, RolloutConfig
from rlhf.phases.ppo.hooks import PpoHook

# Metric: mean absolute difference of a token's log-prob in sampling and training, at equal weights.
MISMATCH = "ppo/logprob_mismatch"
LARGE_MISMATCH = 0.1  # nats; it changes a token's ratio by about a tenth


class LogprobReuse:
    """A rule that decides in each step, for all ranks, if the backend's log-probs are reused.

    With reuse_logprobs=auto the last hook that has a ``logprob_reuse_mode_for_auto`` decides. If
    none has, log-probabilities are reused as long as the last mismatch, measured over all ranks, is
    at most rollout.max_logprob_mismatch. But under dropout in ``actor``, training cannot measure a
    mismatch, and they are never reused.
    """

    def __init__(
        self,
        config: RolloutConfig,
        ppo: PpoConfig,
        hooks: Sequence[PpoHook] = (),
        actor: nn.Module | None = None,
    ) -> None:
        self._config = config
        layers = () if actor is None else actor.modules()
        # Read both: attention's dropout has no layer, and adapters' dropout has no key of ppo.
        self._has_dropout = ppo.actor_dropout > 0 or any(
            isinstance(layer, nn.Dropout) and layer.p > 0 for layer in layers
        )
        self._mode = self._resolve_mode(hooks)
        self._is_comparable = not any(hook.samples_older_policy for hook in hooks)
        self.mismatch: float | None = None  # None: not measured yet

    def can_reuse(self, responses: Responses) -> bool:
        """Return True if the backend's log-probabilities of ``responses`` can be reused."""
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

    def can_measure_mismatch(self, rollout: Rollout, updates: Sequence[object]) -> bool:
        """Return True if the next update can measure the mismatch of reused log-probabilities.

        This is impossible after earlier ``updates`` on the rollout, under dropout, or if an older
        policy sampled the rollout.
        """
        is_measurable = rollout.reuses_logprobs and not updates and not self._has_dropout
        return is_measurable and self._is_comparable

    def mismatch_metrics(self, rollout: Rollout) -> Metrics:
        """Return metrics of the mismatch between the backend's and recomputed log-probabilities.

        Return {} if one of the two is missing, or if they come from different weights.
        """
        measured_BT = rollout.responses.logprobs_BT
        if measured_BT is None or rollout.reuses_logprobs or not self._is_comparable:
            return {}
        return logprob_mismatch(measured_BT, rollout.logprobs_BT, rollout.responses.keep_BT)

    def store_mismatch(self, values: Mapping[str, float]) -> None:
        """Store the mismatch in the metrics ``values`` of a step, if the step measured it."""
        self.mismatch = values.get(MISMATCH, self.mismatch)

    def _resolve_mode(self, hooks: Sequence[PpoHook]) -> When:
        """Return the mode; auto remains only if the measured mismatch decides about reuse."""
        if self._config.reuse_logprobs is not When.auto:
            return self._config.reuse_logprobs
        for hook in reversed(hooks):
            if hook.logprob_reuse_mode_for_auto is not None:
                return hook.logprob_reuse_mode_for_auto
        return When.never if self._has_dropout else When.auto


def logprob_mismatch(one_BT: Tensor, other_BT: Tensor, keep_BT: Tensor) -> Metrics:
    """Return metrics of the difference of two measurements of the same log-probabilities."""
    difference_BT = (one_BT - other_BT).abs()
    return {
        MISMATCH: Mean.of(difference_BT, keep_BT),
        f"{MISMATCH}_share": Mean.of((difference_BT > LARGE_MISMATCH).float(), keep_BT),
        f"{MISMATCH}_max": Maximum.of(difference_BT, keep_BT),
    }
