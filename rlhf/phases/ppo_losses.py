"""What actor and critic minimise on one micro-batch.

Shapes: B = sequences of the micro-batch, T = response tokens.
"""

from __future__ import annotations

from torch import Tensor

from rlhf.algorithms.advantages import Advantages
from rlhf.algorithms.kl import kl_estimate
from rlhf.algorithms.masking import masked_sum, sum_of_means
from rlhf.algorithms.ppo import policy_loss, value_loss
from rlhf.config.choices import KlPlacement, LossAggregation
from rlhf.config.ppo_schema import PpoConfig
from rlhf.metrics import Mean, Metrics
from rlhf.phases.logprob_reuse import differences
from rlhf.phases.ppo_metrics import critic_metrics, policy_metrics
from rlhf.rollout.experience import ResponseLogprobs
from rlhf.types import Rollout


class MicroBatchLoss:
    """The losses of some rows of a rollout, as shares of a whole mini-batch.

    The mini-batch has ``num_sequences`` sequences with ``num_kept`` tokens. ``metrics`` holds those
    of the losses that have been asked for.
    """

    def __init__(
        self,
        config: PpoConfig,
        rollout: Rollout,
        advantages: Advantages,
        *,
        kl_ctl: float,
        num_kept: Tensor,
        num_sequences: int,
    ) -> None:
        self._config = config
        self._rollout = rollout
        self._advantages = advantages
        self._kl_ctl = kl_ctl
        self._num_kept = num_kept
        per_sequence = config.loss_aggregation is LossAggregation.sequence_mean
        self._total = sum_of_means if per_sequence else masked_sum
        self._num_terms = num_sequences if per_sequence else num_kept
        self.metrics: Metrics = {}

    def of_policy(self, policy: ResponseLogprobs) -> Tensor:
        """The clipped surrogate, with KL and entropy where they are charged here."""
        config, rollout, keep_BT = self._config, self._rollout, self._rollout.responses.keep_BT
        logprobs_BT, entropy_BT = policy
        assert entropy_BT is not None
        surrogate = policy_loss(
            logprobs_BT,
            rollout.logprobs_BT,
            self._advantages.advantages_BT,
            keep_BT,
            cliprange=config.cliprange,
            cliprange_high=config.cliprange_high,
            dual_clip=config.dual_clip,
            total=self._total,
        )
        loss = surrogate.loss
        self.metrics |= policy_metrics(surrogate, Mean.of(entropy_BT, keep_BT))
        self.metrics |= differences(logprobs_BT, rollout.logprobs_BT, keep_BT)
        if config.kl_placement is KlPlacement.loss:
            # 0 in dead cells before k3's exponential: an infinite slope there would give nan.
            sides = (logprobs_BT, rollout.reference_logprobs_BT)
            kept = (side_BT.masked_fill(~keep_BT, 0.0) for side_BT in sides)
            kl_BT = kl_estimate(*kept, estimator=config.kl_estimator.value)
            loss = loss + self._kl_ctl * self._total(kl_BT, keep_BT)
            self.metrics["ppo/kl_loss"] = Mean.of(kl_BT, keep_BT)
        if config.entropy_coef:
            loss = loss - config.entropy_coef * self._total(entropy_BT, keep_BT)
        return loss / self._num_terms

    def of_values(self, values_BT: Tensor) -> Tensor:
        """The clipped squared error."""
        error = value_loss(
            values_BT,
            self._rollout.values_BT,
            self._advantages.returns_BT,
            self._rollout.responses.keep_BT,
            cliprange_value=self._config.cliprange_value,
        )
        self.metrics |= critic_metrics(error)
        return self._config.value_coef * error.loss / self._num_kept
