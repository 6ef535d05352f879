"""The language-model loss."""

import math

import torch
from torch import Tensor

from rlhf.algorithms.sft import SftLoss, sft_loss
from rlhf.base.types import SequenceBatch, TokenPositions
from rlhf.models.output_layer import token_logprobs
from tests.algorithms.padded_batches import assert_close, f64, keep_of

UNEQUAL = [0, math.log(2), math.log(5)]  # the softmax is 1/8, 2/8, 5/8


def language_loss(logits_BSV: Tensor, ids_BS: Tensor, keep_BS: Tensor) -> SftLoss:
    """The loss on the kept tokens that are predicted, from the logits of all positions."""
    picks = TokenPositions.from_batch(SequenceBatch(ids_BS, keep_BS, keep_BS))
    logits_NV = logits_BSV[picks.rows_N, picks.columns_N]
    return sft_loss(token_logprobs(logits_NV, picks.ids_N).logprobs_N)


def test_sft_loss_by_hand() -> None:
    # logits at token t predict token t + 1
    # row 0: tokens 2, 0 kept after token 1: -log(5/8) - log(1/8) = 0.4700036 + 2.0794415
    # row 1: token 1 kept: -log(2/8) = 1.3862944. Sum 3.9357395 over three tokens: 1.3119132
    # row 2: only its first token is kept, which nothing predicts
    logits_BSV = f64(*UNEQUAL).expand(3, 3, 3)
    ids_BS, keep_BS = torch.tensor([[1, 2, 0], [2, 1, 0], [1, 1, 1]]), keep_of([3, 2, 1], 3)
    keep_BS[0, 0] = False
    result = language_loss(logits_BSV, ids_BS, keep_BS)
    assert_close(result.loss, 3.9357395, atol=1e-6)
    assert_close(result.mean_loss.value(), 1.3119132, atol=1e-6)
    nothing = language_loss(logits_BSV[2:], ids_BS[2:], keep_BS[2:])
    assert (nothing.loss.item(), nothing.mean_loss.value()) == (0.0, 0.0)


def test_gradient_by_hand() -> None:
    # p - 1[token], at the position before the token: (1/8, 2/8, 5/8 - 1); the last has none
    logits_BSV = f64([UNEQUAL] * 2).requires_grad_()
    language_loss(logits_BSV, torch.tensor([[0, 2]]), keep_of([2], 2)).loss.backward()
    assert_close(logits_BSV.grad, [[[0.125, 0.25, -0.375], [0, 0, 0]]], atol=1e-7)
