"""Pairwise losses of the reward model. Shapes: B = pairs, S = tokens of whole sequences.

Losses are sums over pairs; the caller divides by the number of pairs in the whole batch.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from rlhf.algorithms.masking import last_kept_index
from rlhf.base.metrics import Mean
from rlhf.base.types import PreferenceBatch


class RewardLoss(NamedTuple):
    """A pairwise loss and metrics of how well the scores separate the pairs."""

    loss: Tensor  # scalar sum over pairs, differentiable
    mean_loss: Mean
    accuracy: Mean  # share of pairs whose chosen response scores higher
    margin: Mean  # chosen score minus rejected score
    chosen_score: Mean
    rejected_score: Mean


def end_scores(values_BS: Tensor, attend_BS: Tensor) -> Tensor:
    """Return the score (B,) of each sequence: the value at its last token."""
    return values_BS.gather(1, last_kept_index(attend_BS)[:, None]).squeeze(1)


def end_loss(chosen_scores_B: Tensor, rejected_scores_B: Tensor) -> Tensor:
    """Compute the Bradley-Terry loss (B,) on end scores, https://arxiv.org/abs/2203.02155 eq. 1.

    loss = -log sigmoid(score(chosen) - score(rejected))
    """
    return -functional.logsigmoid(chosen_scores_B - rejected_scores_B)


def divergence_loss(
    chosen_values_BS: Tensor, rejected_values_BS: Tensor, batch: PreferenceBatch
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
    losses_BS = end_loss(chosen_BS, rejected_BS).masked_fill(~keep_BS, 0.0)
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
