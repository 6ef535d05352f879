"""Log-probabilities and entropies of tokens."""

import math
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from hypothesis import given
from torch import Tensor

from rlhf.base.types import LogprobOptions, SequenceBatch, TokenLogprobs, TokenPositions
from rlhf.models.output_layer import (
    TORCH_TOKENS,
    Block,
    _FusedLogprobs,
    fused_logprobs,
    token_logprobs,
)
from tests.algorithms.padded_batches import assert_close, f64, garbage, keeps, normal, quick, seeds

# softmax of log 1, log 2, log 5: 1/8, 2/8, 5/8
LOGITS = f64([[0.0, math.log(2), math.log(5)]] * 3)
IDS = torch.tensor([[0, 1, 2]])
TOLERANCE = 1e-6  # they are computed in fp32


class Told(NamedTuple):
    """What was told of tokens (B, T)."""

    logprobs_BT: Tensor
    entropy_BT: Tensor


Tell = Callable[..., Told]


def shaped(found: TokenLogprobs, ids_BT: Tensor) -> Told:
    return Told(*(x_N.view(ids_BT.shape) for x_N in found))


def by_logits(logits_BTV: Tensor, ids_BT: Tensor, **options: float) -> Told:
    return shaped(token_logprobs(logits_BTV, ids_BT, LogprobOptions(**options)), ids_BT)


def by_layer(logits_BTV: Tensor, ids_BT: Tensor, **options: float) -> Told:
    """Through an output layer whose logits are the hidden state itself.

    Its bias bars tokens that cannot come: an infinity of the hidden state would reach all logits.
    """
    hidden_NH, ids_N = logits_BTV.flatten(0, 1), ids_BT.flatten()
    is_barred_V = (hidden_NH == -math.inf).all(dim=0)
    bias_V = hidden_NH.new_zeros(len(is_barred_V)).masked_fill(is_barred_V, -math.inf)
    hidden_NH = hidden_NH.masked_fill(is_barred_V, 0.0)
    weight_VH = torch.eye(hidden_NH.shape[1], dtype=hidden_NH.dtype)
    block = Block(tokens=2, vocabulary=2)
    return shaped(
        fused_logprobs(hidden_NH, weight_VH, bias_V, ids_N, LogprobOptions(**options), block=block),
        ids_BT,
    )


ways = pytest.mark.parametrize("tell", [by_logits, by_layer])


def random_tokens(keep_BT: Tensor, seed: int) -> tuple[Tensor, Tensor]:
    """Logits over seven tokens, and ids."""
    return normal(*keep_BT.shape, 7, seed=seed), normal(*keep_BT.shape, 7, seed=seed + 1).argmax(-1)


@ways
def test_entropy_carries_no_gradient(tell: Tell) -> None:
    result = tell(LOGITS.clone().requires_grad_(), IDS)
    assert result.logprobs_BT.requires_grad
    assert not result.entropy_BT.requires_grad


@ways
def test_entropy_gradient_of_a_token_that_cannot_come_is_0(tell: Tell) -> None:
    # 3/4, 1/4, 0: H = 0.5623351; -3/4 * (log 3/4 + H) = -0.2059898, and +0.2059898
    logits_BTV = f64([[math.log(3), 0.0, -math.inf]]).requires_grad_()
    result = tell(logits_BTV, torch.tensor([[1]]), entropy_gradient=True)
    result.entropy_BT.sum().backward()
    assert_close(logits_BTV.grad, [[[-0.2059898, 0.2059898, 0.0]]], atol=TOLERANCE)
    assert_close(result.entropy_BT, [[0.5623351]], atol=TOLERANCE)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_left_before_the_softmax(dtype: torch.dtype) -> None:
    logits_BTV = normal(2, 3, 7, seed=0, scale=5.0).to(dtype)
    ids_BT = torch.zeros(2, 3, dtype=torch.long)
    half, single = by_logits(logits_BTV, ids_BT), by_logits(logits_BTV.float(), ids_BT)
    assert half.logprobs_BT.dtype == half.entropy_BT.dtype == torch.float32
    assert half.logprobs_BT.equal(single.logprobs_BT)


def test_fp32_logits_are_not_rounded_between_two_precisions() -> None:
    given = layer(count=64)._replace(bias_V=None)
    half = [x.detach().bfloat16().mul(4).requires_grad_() for x in given[:2]]
    exact = [x.detach().double().requires_grad_() for x in half]
    expected = fused_logprobs(*exact, None, given.ids_N)
    errors = {}
    for keeps_fp32 in (False, True):
        found = fused_logprobs(*half, None, given.ids_N, keeps_fp32=keeps_fp32, block=Block(20, 16))
        errors[keeps_fp32] = (found.logprobs_N - expected.logprobs_N).abs().max()
    assert errors[False] > 1e-2
    assert errors[True] < 1e-5
    gradients = torch.autograd.grad(found.logprobs_N.sum(), half)
    wanted = torch.autograd.grad(expected.logprobs_N.sum(), exact)
    for gradient, want in zip(gradients, wanted, strict=True):  # rounded once, or in slopes
        assert_close(gradient.double(), want, atol=float(want.abs().max()) * 2**-7)


@ways
@quick
@given(keep=keeps(), seed=seeds, value=garbage)
def test_garbage_in_one_token_stays_there(
    tell: Tell, keep: Tensor, seed: int, value: float
) -> None:
    logits_BTV, ids_BT = random_tokens(keep, seed)
    clean = tell(logits_BTV, ids_BT)
    dirty_BTV = torch.where(keep[..., None], logits_BTV, value)
    dirty = tell(dirty_BTV, ids_BT)
    assert dirty.logprobs_BT[keep].equal(clean.logprobs_BT[keep])
    assert dirty.entropy_BT[keep].equal(clean.entropy_BT[keep])


N, V, H = 11, 40, 6


class Layer(NamedTuple):
    """Hidden states, and an output layer over them."""

    hidden_NH: Tensor
    weight_VH: Tensor
    bias_V: Tensor | None
    ids_N: Tensor


def layer(*, dtype: torch.dtype = torch.float64, bias: bool = True, count: int = N) -> Layer:
    bias_V = normal(V, seed=2) if bias else None
    tensors = (normal(count, H, seed=0), normal(V, H, seed=1, scale=0.5), bias_V)
    leaves = (None if x is None else x.to(dtype).requires_grad_() for x in tensors)
    return Layer(*leaves, torch.arange(count) * 7 % V)


def plainly(given: Layer, temperature: float) -> tuple[Tensor, Tensor]:
    """Log-probabilities and entropies in fp64, from all logits."""
    logits_NV = given.hidden_NH.double() @ given.weight_VH.double().T
    if given.bias_V is not None:
        logits_NV = logits_NV + given.bias_V.double()
    logs_NV = (logits_NV / temperature).log_softmax(-1)
    entropy_N = -(logs_NV.exp() * logs_NV).sum(-1)
    return logs_NV[torch.arange(len(given.ids_N)), given.ids_N], entropy_N


def slopes(given: Layer, loss: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(loss, [x for x in given[:3] if x is not None]))


@pytest.mark.parametrize("block", [(1, 1), (4, 7), (50, 60), (3, None)])
@pytest.mark.parametrize("entropy_gradient", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_a_layer_agrees_with_the_plain_formula(
    temperature: float, block: tuple[int, int | None], *, bias: bool, entropy_gradient: bool
) -> None:
    given, pull_N = layer(dtype=torch.float32, bias=bias), normal(N, seed=3)
    options = LogprobOptions(temperature, entropy_gradient=entropy_gradient)
    found = fused_logprobs(*given, options, block=Block(*block))
    logprobs_N, entropy_N = plainly(given, temperature)
    assert found.logprobs_N.dtype == found.entropy_N.dtype == torch.float32
    assert_close(found.logprobs_N.detach(), logprobs_N.detach(), atol=2e-6)
    assert_close(found.entropy_N.detach(), entropy_N.detach(), atol=2e-6)
    loss = (pull_N * logprobs_N).sum()
    ours = (pull_N * found.logprobs_N).sum()
    if entropy_gradient:
        loss, ours = loss + 0.3 * entropy_N.sum(), ours + 0.3 * found.entropy_N.sum()
    for got, expected in zip(slopes(given, ours), slopes(given, loss), strict=True):
        assert_close(got, expected, atol=1e-5)


def test_torch_computes_a_long_block_in_parts() -> None:
    given, pull_N = layer(count=2 * TORCH_TOKENS + 1), normal(2 * TORCH_TOKENS + 1, seed=3)
    options = LogprobOptions(0.6, entropy_gradient=True)
    found = fused_logprobs(*given, options, block=Block(1024, None))  # fp64, which has no kernel
    expected = plainly(given, 0.6)
    for ours_N, theirs_N in zip(found, expected, strict=True):
        assert_close(ours_N.detach(), theirs_N.detach(), atol=2e-6)
    ours, theirs = (
        (pull_N * logprobs_N + entropy_N).sum() for logprobs_N, entropy_N in (found, expected)
    )
    for got, slope in zip(slopes(given, ours), slopes(given, theirs), strict=True):
        assert_close(got, slope, atol=1e-5)


def test_a_weights_gradient_in_bf16_is_rounded_as_rarely_in_many_blocks_as_in_few() -> None:
    count = 64 * 16
    given, pull_N = layer(count=count), normal(count, seed=3).bfloat16()
    halves = [x.detach().bfloat16().requires_grad_() for x in given[:2]]
    rounded = Layer(*(x.detach().double().requires_grad_() for x in halves), None, given.ids_N)
    exact = slopes(rounded, (pull_N.double() * plainly(rounded, 1.0)[0]).sum())[1]

    def error(tokens: int) -> float:
        found = fused_logprobs(*halves, None, given.ids_N, block=Block(tokens, 16))
        (got,) = torch.autograd.grad((pull_N * found.logprobs_N).sum(), halves[1:])
        assert got.dtype is torch.bfloat16
        return float((got - exact).norm() / exact.norm())

    once, few, many = error(count), error(count // 16), error(count // 64)
    assert few < 1.5 * once  # a product and its sum are each rounded once: sqrt(2)
    assert many < 1.5 * once


def test_softmaxes_in_blocks_have_the_gradient_of_their_differences() -> None:
    given = layer()

    def found(*leaves: Tensor) -> tuple[Tensor, ...]:
        options = LogprobOptions(0.8, entropy_gradient=True)
        blocks = (Block(5, 7), Block(3, 20))
        return _FusedLogprobs.apply(*leaves, given.ids_N, options, False, blocks)

    assert torch.autograd.gradcheck(found, given[:3], fast_mode=True)  # along random directions


def test_nothing_as_large_as_the_logits_is_kept_and_only_what_learns_gets_a_gradient() -> None:
    given = layer()
    frozen = given._replace(weight_VH=given.weight_VH.detach())
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        found = fused_logprobs(*frozen, LogprobOptions(0.8), block=Block(4, 40))
    assert kept
    assert max(x.numel() for x in kept) < N * V
    found.logprobs_N.sum().backward()
    assert frozen.weight_VH.grad is None
    assert given.hidden_NH.grad.abs().max() > 0
    with torch.no_grad():
        assert not fused_logprobs(*given).logprobs_N.requires_grad


def test_entropy_is_left_out_where_nobody_asks() -> None:
    given, options = layer(), LogprobOptions(with_entropy=False)
    assert fused_logprobs(*given, options).entropy_N is None
    logits_NV = given.hidden_NH @ given.weight_VH.T
    assert token_logprobs(logits_NV, given.ids_N, options).entropy_N is None


def test_under_autocast_gradients_have_the_type_of_their_parameters() -> None:
    given = layer(dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = fused_logprobs(*given, block=Block(2, 16))
    assert found.logprobs_N.dtype == torch.float32
    halves = [x.detach().bfloat16().float().requires_grad_() for x in given[:3]]
    rounded = Layer(*halves, given.ids_N)
    logprobs_N, entropy_N = plainly(rounded, 1.0)
    assert (found.logprobs_N - logprobs_N).abs().max() < 0.05  # logits of up to 8, in bf16
    assert (found.entropy_N - entropy_N).abs().max() < 0.02
    expected = slopes(rounded, logprobs_N.sum())
    for got, slope in zip(slopes(given, found.logprobs_N.sum()), expected, strict=True):
        assert got.dtype == torch.float32
        assert (got - slope).norm() < 0.02 * slope.norm()


def test_picks_are_the_kept_tokens_that_something_predicts() -> None:
    ids_BS = torch.tensor([[5, 6, 7, 0], [8, 9, 3, 4]])
    keep_BS = torch.tensor([[True, True, False, False], [False, False, True, True]])
    positions = TokenPositions.from_batch(SequenceBatch(ids_BS, ids_BS > 0, keep_BS))
    assert [x.tolist() for x in positions] == [[0, 1, 1], [0, 1, 2], [6, 3, 4]]
