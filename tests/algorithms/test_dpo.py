"""Direct preference optimisation."""

import pytest
import torch
from hypothesis import given
from torch import Tensor

from rlhf.algorithms.dpo import dpo_loss
from tests.algorithms import loop_reference as reference
from tests.algorithms.padded_batches import (
    assert_close,
    f64,
    keeps,
    normal,
    quick,
    seeds,
)
from tests.algorithms.token_sums import language_loss, sequence_logprobs

TOLERANCE = 1e-5  # sums of fp32


@pytest.mark.parametrize(
    ("beta", "loss"),
    [
        # log-ratios 3 and 1: h = 2, less 1 / (2 * beta), squared
        (0.25, 0.0),  # (2 - 2)^2
        (0.5, 1.0),  # (2 - 1)^2
        (1.0, 2.25),  # (2 - 0.5)^2
    ],
)
def test_ipo_by_hand(beta: float, loss: float) -> None:
    pairs = (f64(-1), f64(-4), f64(-4), f64(-5))
    result = dpo_loss(*pairs, beta=beta, loss="ipo")
    assert_close(result.loss, loss)
    assert_close(result.margin.value(), 2 * beta)
    turned = dpo_loss(*pairs, beta=beta, loss="ipo", label_smoothing=1.0)
    assert_close(turned.loss, (2 + 0.5 / beta) ** 2)


@quick
@given(keep=keeps(), seed=seeds)
def test_sequence_logprobs_agree_with_a_loop_and_with_sft(keep: Tensor, seed: int) -> None:
    logits_BSV = normal(*keep.shape, 7, seed=seed)
    ids_BS = normal(*keep.shape, 7, seed=seed + 1).argmax(dim=-1)
    keep_BS = keep & (normal(*keep.shape, seed=seed + 2) < 1)
    result = sequence_logprobs(logits_BSV, ids_BS, keep_BS)
    lists = logits_BSV.tolist(), ids_BS.tolist(), keep_BS.tolist()
    assert_close(result, reference.sequence_logprobs(*lists), atol=TOLERANCE)
    assert_close(-result.sum(), language_loss(logits_BSV, ids_BS, keep_BS).loss, atol=TOLERANCE)


@pytest.mark.parametrize(
    ("label_smoothing", "loss", "slope"),
    [
        # beta 0.5; rewards 0.5 * (-2 + 4) = 1 and 0.5 * (-6 + 3) = -1.5: margin 2.5
        # -log sigmoid(2.5) = 0.0788897; slope by log pi(chosen): -0.5 * sigmoid(-2.5)
        (0.0, 0.0788897, -0.0379291),
        # 0.9 * 0.0788897 + 0.1 * 2.5788897; slope 0.5 * (0.1 - sigmoid(-2.5))
        (0.1, 0.3288897, 0.0120709),
    ],
)
def test_dpo_loss_by_hand(label_smoothing: float, loss: float, slope: float) -> None:
    chosen_B, rejected_B = f64(-2).requires_grad_(), f64(-6).requires_grad_()
    result = dpo_loss(
        chosen_B, rejected_B, f64(-4), f64(-3), beta=0.5, label_smoothing=label_smoothing
    )
    result.loss.backward()
    assert_close(result.loss.detach(), loss, atol=1e-7)
    assert_close(result.chosen_reward.value(), 1.0)
    assert_close(result.rejected_reward.value(), -1.5)
    assert_close(result.margin.value(), 2.5)
    assert result.accuracy.value() == 1.0
    assert_close(chosen_B.grad, [slope], atol=1e-7)
    assert_close(rejected_B.grad, [-slope], atol=1e-7)


def test_large_margins_neither_overflow_nor_lose_their_gradient() -> None:
    # margins +-1000 at beta 1: losses 0 and 1000, slopes 0 and -1
    chosen_B = torch.tensor([-10.0, -1010.0], requires_grad=True)
    result = dpo_loss(
        chosen_B, torch.tensor([-1010.0, -10.0]), torch.zeros(2), torch.zeros(2), beta=1.0
    )
    result.loss.backward()
    assert_close(result.loss.detach(), 1000.0)
    assert_close(chosen_B.grad, [0.0, -1.0])
