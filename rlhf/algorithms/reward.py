"""Losses of the reward model, and its calibration.

Shapes: B = pairs, or single responses; S = tokens of whole sequences. The losses (B,) are
summed by ``build_reward_loss``; the caller divides by the number of pairs in the whole batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from rlhf.algorithms.masking import last_kept_index
from rlhf.base.metrics import Mean
from rlhf.base.types import PreferenceBatch

NUM_BINS = 10  # confidence bins for the calibration error


class RewardLoss(NamedTuple):
    """A pairwise loss, and metrics of how far chosen responses score above rejected ones."""

    loss: Tensor  # scalar sum over pairs, differentiable
    mean_loss: Mean
    accuracy: Mean  # share of pairs whose chosen response scores higher
    margin: Mean  # chosen score minus rejected score
    chosen_score: Mean
    rejected_score: Mean


def end_scores(values_BS: Tensor, attend_BS: Tensor) -> Tensor:
    """Return the score (B,) of each sequence: the value at its last token."""
    return values_BS.gather(1, last_kept_index(attend_BS)[:, None]).squeeze(1)


def end_loss(
    chosen_scores_B: Tensor,
    rejected_scores_B: Tensor,
    margin_B: Tensor | float = 0.0,
    *,
    label_smoothing: float = 0.0,
) -> Tensor:
    """Compute the Bradley-Terry loss (B,) on end scores, https://arxiv.org/abs/2203.02155 eq. 1.

    loss = -log sigmoid(score(chosen) - score(rejected) - margin)

    The margin grows with the strength of the preference (https://arxiv.org/abs/2307.09288, eq. 2).
    With ``label_smoothing`` e the loss is (1 - e) times this loss plus e times the loss of the
    swapped pair: a share e of the labels is assumed to be wrong.
    """
    difference_B = chosen_scores_B - rejected_scores_B
    right_B = functional.logsigmoid(difference_B - margin_B)
    if not label_smoothing:
        return -right_B
    swapped_B = functional.logsigmoid(-difference_B - margin_B)
    return (label_smoothing - 1) * right_B - label_smoothing * swapped_B


def regression_loss(scores_B: Tensor, wanted_B: Tensor) -> Tensor:
    """Compute the squared error (B,) between the scores of responses and the wanted scores."""
    return (scores_B - wanted_B).square()


def classification_loss(scores_B: Tensor, marks_B: Tensor) -> Tensor:
    """Compute the binary cross-entropy (B,) of marks: 1.0 (good) or 0.0 (bad).

    loss = -log sigmoid(score) of a good response, -log sigmoid(-score) of a bad one

    The probability that a response is good is sigmoid(score): logistic regression on the score.
    """
    return -functional.logsigmoid(torch.where(marks_B > 0, scores_B, -scores_B))


def divergence_loss(
    chosen_values_BS: Tensor,
    rejected_values_BS: Tensor,
    batch: PreferenceBatch,
    margin_B: Tensor | None = None,
    *,
    label_smoothing: float = 0.0,
) -> Tensor:
    """Compute DeepSpeed-Chat's loss (B,): the loss of ``end_loss`` averaged over tokens.

    The average covers the tokens from the first that differs to the end of the longer sequence.
    Past the end of the shorter sequence its end score is repeated (DeepSpeed-Chat uses the values
    of the padding). Both batches must be padded to the same length.
    """
    chosen_BS = _repeat_end_score(chosen_values_BS, batch.chosen.attend_BS)
    rejected_BS = _repeat_end_score(rejected_values_BS, batch.rejected.attend_BS)
    either_BS = batch.chosen.attend_BS | batch.rejected.attend_BS
    differs_BS = (batch.chosen.ids_BS != batch.rejected.ids_BS) & either_BS
    differs_BS = differs_BS | (batch.chosen.attend_BS != batch.rejected.attend_BS)
    keep_BS = (differs_BS.cumsum(dim=1) > 0) & either_BS
    margin_B1 = 0.0 if margin_B is None else margin_B[:, None]
    losses_BS = end_loss(chosen_BS, rejected_BS, margin_B1, label_smoothing=label_smoothing)
    losses_BS = losses_BS.masked_fill(~keep_BS, 0.0)
    return losses_BS.sum(dim=1) / keep_BS.sum(dim=1).clamp(min=1)


def _repeat_end_score(values_BS: Tensor, attend_BS: Tensor) -> Tensor:
    """Return the values with the end score repeated over the right padding."""
    last_B1 = last_kept_index(attend_BS)[:, None]
    columns_S = torch.arange(values_BS.shape[1], device=values_BS.device)
    return torch.where(columns_S > last_B1, values_BS.gather(1, last_B1), values_BS)


def build_reward_loss(
    losses_B: Tensor,
    chosen_scores_B: Tensor,
    rejected_scores_B: Tensor,
    weights_B: Tensor | None = None,
) -> RewardLoss:
    """Combine a batch's losses and end scores into a ``RewardLoss``.

    The loss is the sum weighted by ``weights_B`` (None: 1). The metrics are unweighted means over
    the pairs whose weight is above 0.
    """
    weights_B = torch.ones_like(losses_B) if weights_B is None else weights_B
    keep_B, margin_B = weights_B > 0, chosen_scores_B - rejected_scores_B
    return RewardLoss(
        loss=(losses_B * weights_B).sum(),
        mean_loss=Mean.of(losses_B, keep_B),
        accuracy=Mean.of((margin_B > 0).float(), keep_B),
        margin=Mean.of(margin_B, keep_B),
        chosen_score=Mean.of(chosen_scores_B, keep_B),
        rejected_score=Mean.of(rejected_scores_B, keep_B),
    )


def calibration_bins(margin_B: Tensor, keep_B: Tensor) -> dict[str, Mean]:
    """Return the mean confidence and the accuracy of the pairs in each of ``NUM_BINS`` equal bins.

    The confidence is the probability that the Bradley-Terry model gives to the response that it
    prefers, from 0.5 to 1. ``calibration_error`` reads the bins.
    """
    confidence_B = margin_B.abs().sigmoid()
    bin_B = ((confidence_B - 0.5) * 2 * NUM_BINS).long().clamp(max=NUM_BINS - 1)
    bins = {}
    for number in range(NUM_BINS):
        in_bin_B = keep_B & (bin_B == number)
        bins[f"confidence/{number}"] = Mean.of(confidence_B, in_bin_B)
        bins[f"right/{number}"] = Mean.of((margin_B > 0).float(), in_bin_B)
    return bins


def calibration_error(bins: Mapping[str, Mean]) -> float:
    """Return the expected calibration error, https://arxiv.org/abs/1706.04599, eq. 3.

    It is the mean over pairs of |mean confidence - accuracy| in the pair's bin.
    """
    total = pairs = 0.0
    for number in range(NUM_BINS):
        confidence, right = bins[f"confidence/{number}"], bins[f"right/{number}"]
        total += abs(float(confidence.total - right.total))
        pairs += float(right.count)
    return total / pairs if pairs else 0.0
