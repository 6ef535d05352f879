"""Language-model loss of supervised fine-tuning. Shapes: N = tokens that the loss covers."""

from __future__ import annotations

import math
from typing import NamedTuple

from torch import Tensor

from rlhf.metrics import Mean


class SftLoss(NamedTuple):
    """Negative log-likelihood of tokens."""

    loss: Tensor  # scalar sum over tokens, differentiable
    mean_loss: Mean  # nats per token


def sft_loss(logprobs_N: Tensor) -> SftLoss:
    """Compute the sum over tokens of -log p(token | tokens before it), from ``logprobs_N``."""
    return SftLoss(-logprobs_N.sum(), Mean.of(-logprobs_N))


def perplexity(loss: float) -> float:
    """Return exp(``loss``), with ``loss`` in nats per token; infinite if it exceeds a float."""
    try:
        return math.exp(loss)
    except OverflowError:  # of a diverged model
        return math.inf
