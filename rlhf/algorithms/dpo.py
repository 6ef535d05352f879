"""Direct preference optimisation. Shapes: B = pairs or sequences, N = all response tokens.

The loss is a sum over pairs; the caller divides by the number of pairs in the whole batch.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from torch import Tensor
from torch.nn import functional

from rlhf.base.metrics import Mean

DpoLossLiteral = Literal["sigmoid", "ipo"]


class DpoLoss(NamedTuple):
    """The DPO loss and metrics of the implicit rewards, beta * log(pi / pi_ref) per response."""

    loss: Tensor  # scalar sum over pairs, differentiable
    mean_loss: Mean
    accuracy: Mean  # share of pairs whose chosen response has the higher reward
    margin: Mean  # chosen reward minus rejected reward
    chosen_reward: Mean
    rejected_reward: Mean


def sequence_logprobs(logprobs_N: Tensor, rows_N: Tensor, *, num_rows: int) -> Tensor:
    """Return the log-probability (B,) of each of ``num_rows`` rows; token n is in row rows_N[n]."""
    return logprobs_N.new_zeros(num_rows).index_add(0, rows_N, logprobs_N)


def dpo_loss(
    chosen_B: Tensor,
    rejected_B: Tensor,
    reference_chosen_B: Tensor,
    reference_rejected_B: Tensor,
    *,
    beta: float,
    label_smoothing: float = 0.0,
    loss: DpoLossLiteral = "sigmoid",
) -> DpoLoss:
    """Compute the loss of pairs from the log-probabilities (B,) of whole responses.

    reward  = beta * (log pi - log pi_ref)
    margin  = reward(chosen) - reward(rejected)
    sigmoid = -log sigmoid(margin)           https://arxiv.org/abs/2305.18290 eq. 7
    ipo     = (margin - 1/2)^2 / beta^2      https://arxiv.org/abs/2310.12036 eq. 17, tau = beta

    ``label_smoothing`` is the probability that a label is wrong (conservative DPO,
    https://ericmitchell.ai/cdpo.pdf): the loss of the swapped pair gets this weight, and the loss
    of the pair gets the rest.
    """
    chosen_reward_B = beta * (chosen_B - reference_chosen_B)
    rejected_reward_B = beta * (rejected_B - reference_rejected_B)
    margin_B = chosen_reward_B - rejected_reward_B
    match loss:
        case "sigmoid":
            right_B, swapped_B = (-functional.logsigmoid(m_B) for m_B in (margin_B, -margin_B))
        case "ipo":
            right_B, swapped_B = (((m_B - 0.5) / beta).square() for m_B in (margin_B, -margin_B))
    losses_B = (1 - label_smoothing) * right_B + label_smoothing * swapped_B
    return DpoLoss(
        loss=losses_B.sum(),
        mean_loss=Mean.of(losses_B),
        accuracy=Mean.of((margin_B > 0).float()),
        margin=Mean.of(margin_B),
        chosen_reward=Mean.of(chosen_reward_B),
        rejected_reward=Mean.of(rejected_reward_B),
    )
