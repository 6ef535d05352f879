"""Language-model loss of supervised fine-tuning. Shapes: N = tokens that the loss covers."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from rlhf.base.metrics import Mean


class SftLoss(NamedTuple):
    """The loss of supervised fine-tuning: the negative log-likelihood of tokens."""

    loss: Tensor  # scalar sum over tokens, differentiable
    mean_loss: Mean  # nats per token


def sft_loss(logprobs_N: Tensor) -> SftLoss:
    """Compute the sum over tokens of -log p(token | tokens before it), from ``logprobs_N``."""
    return SftLoss(-logprobs_N.sum(), Mean.of(-logprobs_N))
