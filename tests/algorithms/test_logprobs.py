"""Log-probabilities and entropies of tokens."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from rlhf.algorithms.logprobs import token_logprobs
from tests.algorithms import loop_reference as reference
from tests.algorithms.ragged import (
    assert_close,
    f64,
    garbage,
    keeps,
    normal,
    quick,
    seeds,
    shuffled,
)

# softmax of log 1, log 2, log 5: 1/8, 2/8, 5/8
LOGITS = f64([[0.0, math.log(2), math.log(5)]] * 3)
IDS = torch.tensor([[0, 1, 2]])
TOLERANCE = 1e-6  # they are computed in fp32


def random_tokens(keep_BT: Tensor, seed: int) -> tuple[Tensor, Tensor]:
    """Logits over seven tokens, and ids."""
    return normal(*keep_BT.shape, 7, seed=seed), normal(*keep_BT.shape, 7, seed=seed + 1).argmax(-1)


def test_logprobs_by_hand() -> None:
    # log(1/8), log(2/8), log(5/8)
    result = token_logprobs(LOGITS, IDS)
    assert_close(result.logprobs_BT, [[-2.0794415, -1.3862944, -0.4700036]], atol=TOLERANCE)


def test_entropy_by_hand() -> None:
    # log(8) / 8 + log(4) / 4 + 5/8 * log(8/5) = 0.2599302 + 0.3465736 + 0.2937523
    result = token_logprobs(LOGITS, IDS)
    assert_close(result.entropy_BT, [[0.9002561] * 3], atol=TOLERANCE)


def test_temperature_by_hand() -> None:
    # at 0.5 the weights 1, 2, 5 are squared: 1/30, 4/30, 25/30
    # log(30) / 30 + 4/30 * log(7.5) + 25/30 * log(1.2) = 0.1133732 + 0.2686537 + 0.1519346
    result = token_logprobs(LOGITS, IDS, temperature=0.5)
    assert_close(result.logprobs_BT, [[-3.4011974, -2.0149030, -0.1823216]], atol=TOLERANCE)
    assert_close(result.entropy_BT, [[0.5339615] * 3], atol=TOLERANCE)


def test_gradient_by_hand() -> None:
    # d log p_i / d logit_j = (1[i = j] - p_j) / temperature, with p = 1/30, 4/30, 25/30
    logits_BTV = LOGITS[:, 2:].clone().requires_grad_()
    token_logprobs(logits_BTV, IDS[:, 2:], temperature=0.5).logprobs_BT.sum().backward()
    assert_close(logits_BTV.grad, [[[-2 / 30, -8 / 30, 10 / 30]]], atol=TOLERANCE)


def test_entropy_carries_no_gradient() -> None:
    result = token_logprobs(LOGITS.clone().requires_grad_(), IDS)
    assert result.logprobs_BT.requires_grad
    assert not result.entropy_BT.requires_grad


def test_entropy_gradient_by_hand() -> None:
    # d H / d logit_j = -p_j * (log p_j + H), with p = 1/2, 1/4, 1/4 and H = 1.5 log 2:
    # -1/2 * (-1 + 1.5) * log 2 = -0.1732868 and -1/4 * (-2 + 1.5) * log 2 = 0.0866434
    logits_BTV = f64([[math.log(2), 0.0, 0.0]]).requires_grad_()
    result = token_logprobs(logits_BTV, torch.tensor([[0]]), entropy_gradient=True)
    result.entropy_BT.sum().backward()
    assert_close(logits_BTV.grad, [[[-0.1732868, 0.0866434, 0.0866434]]], atol=TOLERANCE)


@quick
@given(seed=seeds, temperature=st.floats(0.5, 2.0))
def test_entropy_gradient_agrees_with_differences_of_the_loop(
    seed: int, temperature: float
) -> None:
    logits_BTV = normal(2, 3, 7, seed=seed).requires_grad_()
    ids_BT = torch.zeros(2, 3, dtype=torch.long)
    plain = token_logprobs(logits_BTV, ids_BT, temperature=temperature)
    result = token_logprobs(logits_BTV, ids_BT, temperature=temperature, entropy_gradient=True)
    assert result.entropy_BT.detach().equal(plain.entropy_BT)
    (gradient,) = torch.autograd.grad(result.entropy_BT.sum(), logits_BTV)
    rows = logits_BTV.detach().flatten(0, 1).tolist()
    slopes = reference.gradient(
        lambda rows: math.fsum(reference.entropy(row, temperature) for row in rows), rows
    )
    assert_close(gradient.flatten(0, 1), slopes, atol=5e-6)


def test_entropy_gradient_of_a_token_that_cannot_come_is_0() -> None:
    # 3/4, 1/4, 0: H = 0.5623351; -3/4 * (log 3/4 + H) = -0.2059898, and +0.2059898
    logits_BTV = f64([[math.log(3), 0.0, -math.inf]]).requires_grad_()
    result = token_logprobs(logits_BTV, torch.tensor([[1]]), entropy_gradient=True)
    result.entropy_BT.sum().backward()
    assert_close(logits_BTV.grad, [[[-0.2059898, 0.2059898, 0.0]]], atol=TOLERANCE)


def test_entropy_of_equal_logits_is_log_of_the_vocabulary() -> None:
    result = token_logprobs(torch.zeros(1, 1, 50), torch.zeros(1, 1, dtype=torch.long))
    assert_close(result.entropy_BT, [[3.9120230]], atol=TOLERANCE)  # log 50


def test_a_token_that_cannot_come_adds_nothing_to_the_entropy() -> None:
    # 1/2, 1/2, 0: log 2
    result = token_logprobs(f64([[0.0, 0.0, -math.inf]]), torch.tensor([[1]]))
    assert_close(result.entropy_BT, [[0.6931472]], atol=TOLERANCE)
    assert_close(result.logprobs_BT, [[-0.6931472]], atol=TOLERANCE)


def test_large_logits_do_not_overflow() -> None:
    # difference 10: log sigmoid(10) = -0.0000454
    result = token_logprobs(f64([[9990.0, 10000.0]]), torch.tensor([[1]]))
    assert_close(result.logprobs_BT, [[-0.0000454]], atol=TOLERANCE)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_left_before_the_softmax(dtype: torch.dtype) -> None:
    logits_BTV = normal(2, 3, 7, seed=0, scale=5.0).to(dtype)
    ids_BT = torch.zeros(2, 3, dtype=torch.long)
    half, single = token_logprobs(logits_BTV, ids_BT), token_logprobs(logits_BTV.float(), ids_BT)
    assert half.logprobs_BT.dtype == half.entropy_BT.dtype == torch.float32
    assert half.logprobs_BT.equal(single.logprobs_BT)


@quick
@given(seed=seeds, temperature=st.floats(0.5, 2.0))
def test_probabilities_of_the_vocabulary_sum_to_1(seed: int, temperature: float) -> None:
    logits_V = normal(7, seed=seed)
    logits_BTV = logits_V.expand(1, 7, 7)
    result = token_logprobs(logits_BTV, torch.arange(7)[None], temperature=temperature)
    assert_close(result.logprobs_BT.exp().sum(), 1.0, atol=TOLERANCE)
    entropy = -(result.logprobs_BT.exp() * result.logprobs_BT).sum()
    assert_close(result.entropy_BT[0, 0], entropy, atol=TOLERANCE)


@quick
@given(seed=seeds, shift=st.floats(-5.0, 5.0))
def test_a_shift_of_all_logits_changes_nothing(seed: int, shift: float) -> None:
    logits_BTV, ids_BT = normal(2, 3, 7, seed=seed), torch.zeros(2, 3, dtype=torch.long)
    plain, shifted = token_logprobs(logits_BTV, ids_BT), token_logprobs(logits_BTV + shift, ids_BT)
    assert_close(shifted.logprobs_BT, plain.logprobs_BT, atol=5e-6)
    assert_close(shifted.entropy_BT, plain.entropy_BT, atol=5e-6)


@quick
@given(keep=keeps(), seed=seeds, value=garbage)
def test_garbage_in_one_token_stays_there(keep: Tensor, seed: int, value: float) -> None:
    logits_BTV, ids_BT = random_tokens(keep, seed)
    clean = token_logprobs(logits_BTV, ids_BT)
    dirty_BTV = torch.where(keep[..., None], logits_BTV, value)
    dirty = token_logprobs(dirty_BTV, ids_BT)
    assert dirty.logprobs_BT[keep].equal(clean.logprobs_BT[keep])
    assert dirty.entropy_BT[keep].equal(clean.entropy_BT[keep])


@quick
@given(keep=keeps(), seed=seeds)
def test_batch_order_and_parts_change_nothing(keep: Tensor, seed: int) -> None:
    logits_BTV, ids_BT = random_tokens(keep, seed)
    whole = token_logprobs(logits_BTV, ids_BT)
    order = shuffled(len(keep), seed=seed)
    rows = [token_logprobs(logits_BTV[i : i + 1], ids_BT[i : i + 1]) for i in order]
    assert_close(torch.cat([row.logprobs_BT for row in rows]), whole.logprobs_BT[order], atol=1e-6)
    assert_close(torch.cat([row.entropy_BT for row in rows]), whole.entropy_BT[order], atol=1e-6)
