"""The language-model loss."""

from __future__ import annotations

import math

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from rlhf.algorithms.sft import SftLoss
from rlhf.models.output_layer import token_logprobs
from tests.algorithms.padded_batches import (
    assert_close,
    f64,
    keep_of,
    keeps,
    normal,
    quick,
    seeds,
    shuffled,
    with_padding,
)
from tests.algorithms.token_sums import language_loss

TOLERANCE = 1e-5  # sums of fp32
finite = st.sampled_from([0.0, -9.0, 7e7])


def random_inputs(keep_BS: Tensor, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Logits over seven tokens, ids, and a keep mask with holes."""
    logits_BSV = normal(*keep_BS.shape, 7, seed=seed)
    ids_BS = normal(*keep_BS.shape, 7, seed=seed + 1).argmax(dim=-1)
    return logits_BSV, ids_BS, keep_BS & (normal(*keep_BS.shape, seed=seed + 2) < 1)


def with_gradient(logits_BSV: Tensor, ids_BS: Tensor, keep_BS: Tensor) -> tuple[SftLoss, Tensor]:
    """The result, and the gradient of its sum by the logits."""
    logits_BSV = logits_BSV.clone().requires_grad_()
    result = language_loss(logits_BSV, ids_BS, keep_BS)
    (gradient,) = torch.autograd.grad(result.loss, logits_BSV)
    return result, gradient


def test_sft_loss_by_hand() -> None:
    # logits at token t predict token t + 1. Softmax of log 1, log 2, log 5: 1/8, 2/8, 5/8.
    # row 0: tokens 2, 0 kept after token 1: -log(5/8) - log(1/8) = 0.4700036 + 2.0794415
    # row 1: token 1 kept: -log(2/8) = 1.3862944. Sum 3.9357395 over three tokens: 1.3119132
    logits_BSV = f64(0, math.log(2), math.log(5)).expand(2, 3, 3)
    ids_BS, keep_BS = torch.tensor([[1, 2, 0], [2, 1, 0]]), keep_of([3, 2], 3)
    keep_BS[0, 0] = False
    result = language_loss(logits_BSV, ids_BS, keep_BS)
    assert_close(result.loss, 3.9357395, atol=1e-6)
    assert_close(result.mean_loss.value(), 1.3119132, atol=1e-6)


def test_the_first_token_is_never_predicted() -> None:
    logits_BSV, ids_BS = normal(2, 3, 7, seed=0), torch.zeros(2, 3, dtype=torch.long)
    result = language_loss(logits_BSV, ids_BS, keep_of([1, 1], 3))
    assert (result.loss.item(), result.mean_loss.value()) == (0.0, 0.0)


def test_gradient_by_hand() -> None:
    # p - 1[token], at the position before the token: (1/8, 2/8, 5/8 - 1); the last has none
    logits_BSV = f64([[0, math.log(2), math.log(5)]] * 2)
    _, gradient = with_gradient(logits_BSV, torch.tensor([[0, 2]]), keep_of([2], 2))
    assert_close(gradient, [[[0.125, 0.25, -0.375], [0, 0, 0]]], atol=1e-7)


@quick
@given(keep=keeps(), seed=seeds)
def test_sft_loss_is_minus_the_sum_of_logprobs(keep: Tensor, seed: int) -> None:
    logits_BSV, ids_BS, keep_BS = random_inputs(with_padding(keep, 1), seed)
    logprobs = token_logprobs(logits_BSV[:, :-1], ids_BS[:, 1:]).logprobs_N
    result = language_loss(logits_BSV, ids_BS, keep_BS)
    assert_close(result.loss, -logprobs[keep_BS[:, 1:]].sum(), atol=TOLERANCE)
    count = max(1, int(keep_BS[:, 1:].sum()))
    assert_close(result.mean_loss.value(), result.loss.item() / count, atol=TOLERANCE)


@quick
@given(keep=keeps(), seed=seeds, value=finite, extra=st.integers(0, 3))
def test_padding_never_changes_loss_metrics_or_gradient(
    keep: Tensor, seed: int, value: float, extra: int
) -> None:
    logits_BSV, ids_BS, keep_BS = random_inputs(keep, seed)
    clean, clean_gradient = with_gradient(logits_BSV, ids_BS, keep_BS)
    dirty_ids_BS = torch.where(keep_BS, ids_BS, 6)
    predicts_BS = with_padding(keep_BS, 1)[:, 1:]  # logits one step before a kept token
    garbage_V = value * normal(7, seed=seed).sign()
    dirty_BSV = torch.where(predicts_BS[..., None], logits_BSV, garbage_V)
    more_BSV = garbage_V.expand(len(keep), extra, 7)
    dirty, gradient = with_gradient(
        torch.cat([dirty_BSV, more_BSV], dim=1),
        with_padding(dirty_ids_BS, extra),
        with_padding(keep_BS, extra),
    )
    assert_close(dirty.loss.detach(), clean.loss.detach(), atol=TOLERANCE)
    assert_close(dirty.mean_loss.value(), clean.mean_loss.value(), atol=TOLERANCE)
    assert_close(gradient[:, : keep.shape[1]], clean_gradient, atol=TOLERANCE)
    assert not gradient[:, keep.shape[1] :].any()


@quick
@given(keep=keeps(min_rows=2), seed=seeds, size=st.integers(1, 4))
def test_batch_order_and_micro_batches_change_nothing(keep: Tensor, seed: int, size: int) -> None:
    inputs = random_inputs(keep, seed)
    whole, whole_gradient = with_gradient(*inputs)
    order = shuffled(len(keep), seed=seed)
    parts = [with_gradient(*(x[rows] for x in inputs)) for rows in order.split(size)]
    total = sum(part.loss.item() for part, _ in parts)
    first, *others = (part.mean_loss for part, _ in parts)
    assert_close(total, whole.loss.item(), atol=TOLERANCE)
    assert_close(sum(others, start=first).value(), whole.mean_loss.value(), atol=TOLERANCE)
    assert_close(torch.cat([g for _, g in parts]), whole_gradient[order], atol=TOLERANCE)


def test_half_precision_is_left_before_the_softmax() -> None:
    logits_BSV, ids_BS, keep_BS = random_inputs(keep_of([5, 3], 5), seed=0)
    half = language_loss(logits_BSV.bfloat16(), ids_BS, keep_BS)
    assert half.loss.dtype == torch.float32
    assert half.loss.equal(language_loss(logits_BSV.bfloat16().float(), ids_BS, keep_BS).loss)
