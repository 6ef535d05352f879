"""PPO's objective: the micro-batches of an update, and the losses of actor and critic.

Shapes: B = sequences of a micro-batch, T = response tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from rlhf.algorithms.advantages import Advantages
from rlhf.algorithms.kl import KlEstimatorName, estimate_kl
from rlhf.algorithms.masking import masked_sum, sum_of_row_means
from rlhf.algorithms.ppo import (
    PolicyLoss,
    cispo_loss,
    dppo_loss,
    gspo_loss,
    policy_loss,
    value_loss,
)
from rlhf.base.metrics import Mean, Metrics, loss_metrics
from rlhf.base.ranks import Ranks
from rlhf.base.stored_responses import join_rows
from rlhf.base.types import Rollout, take_rows
from rlhf.config.choices import KlPlacement
from rlhf.config.schema.ppo import LossAggregation, SurrogateName
from rlhf.data.collate import assign_rows_to_ranks
from rlhf.options import PpoConfig
from rlhf.phases.ppo.logprob_reuse import logprob_mismatch
from rlhf.phases.shared.scoring import (
    ResponseLogprobs,
    WholeSequences,
    sequence_lengths,
    sort_rows_by_length,
    split_rows,
)


def learned_mask(config: PpoConfig, rollout: Rollout) -> Tensor:
    """Return the mask (B, T) that is True at the tokens that enter the losses.

    The policy wrote these tokens; with ppo.missing_end_mask their response has also ended.
    """
    keep_BT, ended_B = rollout.responses.keep_BT, rollout.responses.ended_B
    return keep_BT & ended_B[:, None] if config.missing_end_mask else keep_BT


class MicroBatch(NamedTuple):
    """Sequences of one forward pass, with the tensors of the rollout that the losses need."""

    sequences: WholeSequences
    keep_BT: Tensor  # the tokens that enter the losses
    logprobs_BT: Tensor  # of the policy at the start of the step
    sampled_logprobs_BT: Tensor  # of the policy that sampled
    reference_logprobs_BT: Tensor
    values_BT: Tensor
    advantages_BT: Tensor
    returns_BT: Tensor


def gather_rollout(
    rollout: Rollout, advantages: Advantages, ranks: Ranks
) -> tuple[Rollout, Advantages]:
    """Return, on every rank, the rows of all ranks in host memory, with only what losses need.

    With one rank, the arguments are returned unchanged.
    """
    if ranks.size == 1:
        return rollout, advantages
    prompts = rollout.prompts
    needed = rollout._replace(
        prompts=prompts._replace(draws_BT=prompts.draws_BT[:, :0], columns=None, seeds=None),
        seconds=None,
        parts=None,
        last_values_B=None,
        measures={},
        extras={},
    )
    rows, host = list(range(len(rollout.scores_B))), torch.device("cpu")
    local = (take_rows(needed, rows, host), take_rows(advantages, rows, host))
    rollouts, each_advantages = zip(*ranks.all_gather(local), strict=True)
    return join_rows(rollouts, pad_id=0), join_rows(each_advantages, pad_id=0)


def deal_mini_batch(rollout: Rollout, rows: list[int], ranks: Ranks, *, micro: int) -> list[int]:
    """Return this rank's share of a mini-batch's ``rows``; ranks get about equally many tokens."""
    if ranks.size == 1:
        return rows
    tokens = sequence_lengths(rollout.prompts, rollout.responses)
    lengths = [tokens[row] for row in rows]
    indices = assign_rows_to_ranks(lengths, ranks=ranks.size, micro=micro)[ranks.rank]
    return [rows[index] for index in indices]


def cut_micro_batches(
    config: PpoConfig,
    rollout: Rollout,
    advantages: Advantages,
    rows: list[int],
    size: int,
    device: torch.device,
) -> list[MicroBatch]:
    """Cut ``rows`` of a rollout into micro-batches of ``size`` rows of similar length."""
    batches = []
    for part in split_rows(sort_rows_by_length(rollout.prompts, rollout.responses, rows), size):
        taken = take_rows(rollout, part, device)
        batches.append(
            MicroBatch(
                WholeSequences(taken.prompts, taken.responses),
                learned_mask(config, taken),
                taken.logprobs_BT,
                taken.sampled_logprobs_BT,
                taken.reference_logprobs_BT,
                taken.values_BT,
                *take_rows(advantages, part, device),
            )
        )
    return batches


Total = Callable[[Tensor, Tensor], Tensor]  # reduces (B, T) under a mask to a scalar


class Aggregation(NamedTuple):
    """The mean of token losses over a mini-batch: ``total(x_BT, keep_BT) / divisor``."""

    total: Total
    divisor: Tensor | int
    num_tokens: Tensor  # kept response tokens of the mini-batch, over all ranks

    @classmethod
    def build_for_mini_batch(
        cls, config: PpoConfig, keep_BT: Tensor, ranks: Ranks, *, max_tokens: int
    ) -> Aggregation:
        """Return the mean over a mini-batch; ``keep_BT`` has this rank's rows of the mini-batch.

        ``max_tokens`` is the length of the longest possible response. Dr. GRPO divides by it
        instead of by each response's own length, https://arxiv.org/abs/2503.20783.
        """
        num_tokens, responses = ranks.sum(keep_BT.sum()).clamp(min=1), len(keep_BT) * ranks.size
        match config.loss_aggregation:
            case LossAggregation.sequence_mean:
                return cls(sum_of_row_means, responses, num_tokens)
            case LossAggregation.fixed_length:
                return cls(masked_sum, responses * max_tokens, num_tokens)
            case LossAggregation.token_mean:
                return cls(masked_sum, num_tokens, num_tokens)


class SurrogateInputs(NamedTuple):
    """The tensors (B, T) from which a surrogate loss is computed."""

    logprobs_BT: Tensor
    old_logprobs_BT: Tensor  # of the policy in the ratio's denominator
    advantages_BT: Tensor
    keep_BT: Tensor
    sampled_logprobs_BT: Tensor  # of the policy that sampled; dppo compares the new policy with it


class Surrogate(Protocol):
    """A function that computes the actor's loss without penalties.

    Options may replace it (``PpoHook.change_surrogate``).
    """

    def __call__(
        self, inputs: SurrogateInputs, config: PpoConfig, total: Total, /
    ) -> tuple[PolicyLoss, Metrics]:
        """Return the loss, whose tokens ``total`` reduces to a scalar, and further metrics."""


def _clipped_surrogate(
    inputs: SurrogateInputs, config: PpoConfig, total: Total, /
) -> tuple[PolicyLoss, Metrics]:
    low, high, dual = config.cliprange, config.cliprange_high, config.dual_clip
    loss = policy_loss(*inputs[:4], cliprange=low, cliprange_high=high, dual_clip=dual, total=total)
    return loss, {}


def _gspo_surrogate(
    inputs: SurrogateInputs, config: PpoConfig, total: Total, /
) -> tuple[PolicyLoss, Metrics]:
    low, high = config.cliprange, config.cliprange_high
    return gspo_loss(*inputs[:4], cliprange=low, cliprange_high=high, total=total), {}


def _cispo_surrogate(
    inputs: SurrogateInputs, config: PpoConfig, total: Total, /
) -> tuple[PolicyLoss, Metrics]:
    high = config.cliprange_high or config.cliprange
    return cispo_loss(*inputs[:4], cliprange_high=high, total=total), {}


def _dppo_surrogate(divergence: Literal["tv", "kl"]) -> Surrogate:
    def surrogate(
        inputs: SurrogateInputs, config: PpoConfig, total: Total, /
    ) -> tuple[PolicyLoss, Metrics]:
        low, high = config.cliprange, config.cliprange_high
        limits = (low, low if high is None else high)
        return dppo_loss(*inputs, divergence=divergence, limits=limits, total=total), {}

    return surrogate


SURROGATES: dict[SurrogateName, Surrogate] = {
    SurrogateName.clip: _clipped_surrogate,
    SurrogateName.gspo: _gspo_surrogate,
    SurrogateName.cispo: _cispo_surrogate,
    SurrogateName.dppo_tv: _dppo_surrogate("tv"),
    SurrogateName.dppo_kl: _dppo_surrogate("kl"),
}


class Objective(NamedTuple):
    """The losses of PPO on one mini-batch."""

    config: PpoConfig
    surrogate: Surrogate
    kl_ctl: float
    entropy_coef: float
    mean: Aggregation
    measures_mismatch: bool  # log-probabilities were reused, and no weight has changed since

    def actor_loss(self, policy: ResponseLogprobs, batch: MicroBatch) -> tuple[Tensor, Metrics]:
        """Return the actor's loss, which is the surrogate plus penalties, and its metrics."""
        inputs = SurrogateInputs(
            policy.logprobs_BT,
            batch.logprobs_BT,
            batch.advantages_BT,
            batch.keep_BT,
            batch.sampled_logprobs_BT,
        )
        loss, surrogate_metrics = self.surrogate(inputs, self.config, self.mean.total)
        penalty, metrics = self._penalty(policy, batch)
        if self.measures_mismatch:
            written_BT = batch.sequences.keep_BT
            metrics |= logprob_mismatch(policy.logprobs_BT, batch.logprobs_BT, written_BT)
        total = (loss.loss + penalty) / self.mean.divisor
        return total, loss_metrics("ppo", loss) | surrogate_metrics | metrics

    def critic_loss(self, values_BT: Tensor, batch: MicroBatch) -> tuple[Tensor, Metrics]:
        """Return ``value_coef`` times the value loss, and its metrics."""
        value = value_loss(
            values_BT,
            batch.values_BT,
            batch.returns_BT,
            batch.keep_BT,
            cliprange_value=self.config.cliprange_value,
        )
        loss = self.config.value_coef * value.loss / self.mean.num_tokens
        return loss, loss_metrics("ppo", value)

    def _penalty(
        self, policy: ResponseLogprobs, batch: MicroBatch
    ) -> tuple[Tensor | float, Metrics]:
        """Return KL penalty minus entropy bonus, each reduced by ``mean.total``, and metrics.

        By default both terms are 0: the KL penalty is part of the reward, as in InstructGPT.
        """
        config, keep_BT, entropy_BT = self.config, batch.keep_BT, policy.entropy_BT
        assert entropy_BT is not None
        penalty: Tensor | float = 0.0
        metrics: Metrics = {"ppo/entropy": Mean.of(entropy_BT, keep_BT)}
        if config.stop_update_kl is not None:
            sides = (batch.sampled_logprobs_BT, policy.logprobs_BT.detach())
            metrics["ppo/sampler_kl"] = Mean.of(estimate_kl(*sides, estimator="k3"), keep_BT)
        if config.kl_placement is KlPlacement.loss:
            kl_BT = _differentiable_kl(policy, batch, estimator=config.kl_estimator.value)
            penalty = self.kl_ctl * self.mean.total(kl_BT, keep_BT)
            metrics["ppo/kl_loss"] = Mean.of(kl_BT, keep_BT)
        if self.entropy_coef:
            penalty = penalty - self.entropy_coef * self.mean.total(entropy_BT, keep_BT)
        return penalty, metrics


def _differentiable_kl(
    policy: ResponseLogprobs, batch: MicroBatch, *, estimator: KlEstimatorName
) -> Tensor:
    """Return KL(policy || reference) of each response token (B, T), with gradients.

    k3 is not clamped: a clamp would remove the gradient where the policy differs most. k3
    overflows in fp32 if the reference gives a token e^89 times the policy's probability; the
    optimizer step is then skipped.
    """
    # Zero the padding before the exponentials: an infinite slope there would give NaN gradients.
    sides = (policy.logprobs_BT, batch.reference_logprobs_BT, batch.sampled_logprobs_BT)
    new_BT, reference_BT, sampled_BT = (side.masked_fill(~batch.keep_BT, 0.0) for side in sides)
    return estimate_kl(new_BT, reference_BT, estimator=estimator, sampled_logprobs=sampled_BT)
