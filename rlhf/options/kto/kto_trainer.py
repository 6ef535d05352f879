"""Train the policy with KTO, and measure it.

Shapes: B = responses, N = held-out responses.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rlhf.algorithms.ranking import measure_ranking
from rlhf.base.metrics import Mean, Metrics, loss_metrics
from rlhf.config.choices import Phase
from rlhf.phases.dpo import DpoTrainer, logprobs_of_responses
from rlhf.phases.shared.supervised import (
    Rows,
    collate_response_rows,
    held_out_values,
    share_of_this_rank,
    split_table_rows,
)


class KtoTrainer(DpoTrainer):
    """A trainer that updates the policy by KTO, one optimizer step on responses per call.

    The reference point of a step is one number: the estimate over the whole batch, of all ranks and
    micro-batches, by the policy before the step. So the division of a batch does not change it, and
    a resumed run computes it again.
    """

    unit = "responses"
    _reference_point = 0.0

    def train_step(self, rows: Rows) -> dict[str, float]:
        """Take an optimizer step on this rank's share of the batch ``rows``; return metrics."""
        self._reference_point = self._estimate_kl(rows)
        return super().train_step(rows) | {"dpo/reference_point": self._reference_point}

    def measure(self, examples: Any) -> tuple[dict[str, float], dict[str, Any]]:
        """Return metrics of the held-out ``examples`` to log, and entries of result.json."""
        from datasets import Dataset

        rows = examples[: self._context.config.dpo.eval_examples]
        mismatched = Dataset.from_dict(self._mismatch(rows))
        kl = float(self._held_out_log_ratios(mismatched).mean())
        log_ratios_N = self._held_out_log_ratios(Dataset.from_dict(rows))
        is_good_N = torch.tensor(rows["grade"]) > 0
        ranking = measure_ranking(log_ratios_N, is_good_N)
        loss = self._loss_of(log_ratios_N, is_good_N, max(0.0, kl)).mean_loss
        metrics = {"dpo/eval_accuracy": ranking.accuracy, "dpo/eval_loss": loss.value()}
        return metrics, ranking.results()

    def losses(self, rows: Rows) -> Iterator[tuple[Tensor, Metrics]]:
        """Yield the loss, a sum over ``rows``, and metrics."""
        log_ratios_B = self._log_ratios(rows)
        is_good_B = log_ratios_B.new_tensor(rows["grade"]) > 0
        result = self._loss_of(log_ratios_B, is_good_B, self._reference_point)
        yield result.loss, loss_metrics(Phase.dpo, result)

    def _loss_of(self, log_ratios_B: Tensor, is_good_B: Tensor, reference_point: float) -> KtoLoss:
        config = self._context.config.dpo
        return kto_loss(
            log_ratios_B,
            is_good_B,
            reference_point=reference_point,
            beta=config.beta,
            desirable_weight=config.desirable_weight,
            undesirable_weight=config.undesirable_weight,
        )

    def _mismatch(self, rows: Rows) -> Rows:
        return mismatch_responses(rows, max_tokens=self._context.config.dpo.max_tokens)

    def _estimate_kl(self, rows: Rows) -> float:
        """Return the reference point of the batch ``rows``, the estimate over all ranks."""
        context, micro = self._context, self._plan.micro
        rows = self._mismatch(rows)
        mine = share_of_this_rank(context, range(len(rows["ids"])), rows["length"], micro=micro)
        rows = {name: [values[row] for row in mine] for name, values in rows.items()}
        with self.policy.evaluating():
            parts = [self._log_ratios(part) for part in split_table_rows(rows, micro)]
        found = context.ranks.reduce_metrics({"kl": Mean.of(torch.cat(parts))})
        return max(0.0, found["kl"].value())

    def _log_ratios(self, rows: Rows) -> Tensor:
        """Return log(pi / pi_ref) (B,) of the whole responses ``rows``."""
        max_tokens = self._context.config.dpo.max_tokens
        batch = collate_response_rows(self._context, rows, max_tokens=max_tokens)
        with self._reference.evaluating():
            reference_B = logprobs_of_responses(self._reference, batch)
        return logprobs_of_responses(self.policy, batch) - reference_B

    def _held_out_log_ratios(self, examples: Any) -> Tensor:
        """Return log(pi / pi_ref) (N,) of all ``examples``, in double precision, on every rank."""
        context, micro = self._context, self._plan.micro
        return held_out_values(
            context, self.policy, examples, self._log_ratios, limit=len(examples), micro=micro
        )


class KtoLoss(NamedTuple):
    """The loss of KTO, and means of the implicit rewards, beta * log(pi / pi_ref)."""

    loss: Tensor  # scalar sum over responses, differentiable
    mean_loss: Mean
    chosen_reward: Mean  # of good responses
    rejected_reward: Mean  # of bad responses


def kto_loss(
    log_ratios_B: Tensor,
    is_good_B: Tensor,
    *,
    reference_point: float,
    beta: float,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> KtoLoss:
    """Compute the loss of marked responses, https://arxiv.org/abs/2402.01306, section 4.1.

    good  loss = desirable_weight   * (1 - sigmoid(beta * (log_ratio - reference_point)))
    bad   loss = undesirable_weight * (1 - sigmoid(beta * (reference_point - log_ratio)))

    Args:
        log_ratios_B: log(pi / pi_ref) of whole responses.
        is_good_B: bool; True where the response is marked as good.
        reference_point: estimate of KL(pi || pi_ref) in nats, at least 0; it has no gradient.
    """
    gains_B = torch.where(is_good_B, 1.0, -1.0) * (log_ratios_B - reference_point)
    weights_B = torch.where(is_good_B, desirable_weight, undesirable_weight)
    losses_B = weights_B * torch.sigmoid(-beta * gains_B)
    rewards_B = beta * log_ratios_B
    return KtoLoss(
        loss=losses_B.sum(),
        mean_loss=Mean.of(losses_B),
        chosen_reward=Mean.of(rewards_B, is_good_B),
        rejected_reward=Mean.of(rewards_B, ~is_good_B),
    )


def mismatch_responses(
    rows: Mapping[str, Sequence[Any]], *, max_tokens: int
) -> dict[str, list[Any]]:
    """Return ``rows``, tokenised responses, with the response of the next row after each prompt.

    The last prompt gets the first response (section 4.1, the estimate of z_0). A response that
    would end after ``max_tokens`` is cut there.
    """
    responses = [ids[start:] for ids, start in zip(rows["ids"], rows["prompt_tokens"], strict=True)]
    prompts = [ids[:start] for ids, start in zip(rows["ids"], rows["prompt_tokens"], strict=True)]
    others = [*responses[1:], *responses[:1]]
    found = [[*prompt, *other][:max_tokens] for prompt, other in zip(prompts, others, strict=True)]
    return {
        "ids": found,
        "prompt_tokens": list(rows["prompt_tokens"]),
        "length": [len(ids) for ids in found],
    }
