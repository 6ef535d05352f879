"""PPO's two losses."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from rlhf.algorithms.ppo import (
    PolicyLoss,
    ValueLoss,
    cispo_loss,
    dppo_loss,
    gspo_loss,
    policy_loss,
    value_loss,
)
from rlhf.base.metrics import Maximum, Mean
from tests.algorithms.padded_batches import (
    assert_close,
    f64,
    keep_of,
    keeps,
    normal,
    quick,
    seeds,
    shuffled,
)

Result = PolicyLoss | ValueLoss
Loss = Callable[..., Result]


actor = partial(policy_loss, cliprange=0.2)
cispo_actor = partial(cispo_loss, cliprange_high=0.2)
ACTORS: dict[str, Loss] = {  # limits narrow enough to hold some tokens
    "clip": actor,
    "clip, two sides and a bound": partial(
        policy_loss, cliprange=0.1, cliprange_high=0.3, dual_clip=1.5
    ),
    "gspo": partial(gspo_loss, cliprange=0.05, cliprange_high=0.1),
    "cispo": cispo_actor,
    "dppo_tv": partial(dppo_loss, divergence="tv", limits=(0.05, 0.1)),
    "dppo_kl": partial(dppo_loss, divergence="kl", limits=(0.02, 0.02)),
}
critic = partial(value_loss, cliprange_value=0.2)
plain_critic = partial(value_loss, cliprange_value=None)
losses = st.sampled_from([*ACTORS.values(), critic, plain_critic])


def random_inputs(loss: Loss, keep_BT: Tensor, seed: int) -> list[Tensor]:
    """New and old log-probs and advantages, or new and old values and returns."""
    one, two, three = (normal(*keep_BT.shape, seed=3 * seed + part) for part in range(3))
    old = -one.abs() if loss in ACTORS.values() else one
    return [old + 0.3 * two, old, three]


def with_gradient(loss: Loss, inputs: list[Tensor], keep_BT: Tensor) -> tuple[Result, Tensor]:
    """The result, and the gradient of its sum by the first input."""
    first = inputs[0].clone().requires_grad_()
    result = loss(first, *inputs[1:], keep_BT)
    (gradient,) = torch.autograd.grad(result.loss, first)
    return result, gradient


def assert_same(actual: Result, expected: Result) -> None:
    """Equal sums and equal metrics."""
    assert_close(actual.loss.detach(), expected.loss.detach())
    for metric, other in zip(actual[1:], expected[1:], strict=True):
        assert_close(metric.value(), other.value())


def merged(parts: list[Result]) -> Any:
    """Losses summed, metrics merged."""
    first, *others = parts
    for part in others:
        first = type(first)(*(a + b for a, b in zip(first, part, strict=True)))
    return first


@pytest.mark.parametrize(
    ("divergence", "old", "new", "advantage", "slope", "is_limited"),
    [
        # total variation, limits 0.15 (A < 0) and 0.2 (A > 0); slope by log pi: -A * ratio
        ("tv", 0.001, 0.003, +1.0, -3.0, False),  # a rare token may become three times as likely
        ("tv", 1e-6, 1e-3, +1.0, -20.0, True),  # a thousand times: D is 0.001, the ratio is capped
        ("tv", 1e-6, 1e-3, -1.0, +20.0, True),
        ("tv", 0.7, 0.95, +1.0, 0.0, True),  # a ratio of 1.36, but 0.25 of all probability
        ("tv", 0.7, 0.88, +1.0, -0.88 / 0.7, False),  # 0.18: between the limits
        ("tv", 0.7, 0.52, -1.0, 0.0, True),
        ("tv", 0.7, 0.4, +1.0, -0.4 / 0.7, False),  # a good token that fell may rise again
        ("tv", 0.4, 0.7, -1.0, +0.7 / 0.4, False),  # a bad token that rose may fall again
        ("tv", 0.4, 0.9, +0.0, 0.0, False),
        # 0.5 log(0.5 / 0.8) + 0.5 log(0.5 / 0.2) = 0.2231: above 0.2; 0.7 for 0.8: 0.0872
        ("kl", 0.5, 0.8, +1.0, 0.0, True),
        ("kl", 0.5, 0.7, +1.0, -1.4, False),
        ("kl", 0.5, 0.2, -1.0, 0.0, True),
        ("kl", 1e-6, 1e-3, +1.0, -20.0, True),
        ("kl", 1.0, 1.0, -1.0, 1.0, False),  # certain tokens: finite, and not far
        ("kl", 0.5, 1.0, +1.0, 0.0, True),
    ],
)
def test_dppo_of_one_token_by_hand(
    divergence: Literal["tv", "kl"],
    old: float,
    new: float,
    advantage: float,
    slope: float,
    is_limited: bool,
) -> None:
    inputs = [f64([new]).log(), f64([old]).log(), f64([advantage])]
    result, gradient = with_gradient(
        lambda *args: dppo_loss(*args, divergence=divergence, limits=(0.15, 0.2)),
        inputs,
        keep_of([1], 1),
    )
    assert isinstance(result, PolicyLoss)
    assert result.loss.item() == pytest.approx(slope * math.log(new), abs=1e-6)
    assert result.clipfrac.value() == is_limited
    assert_close(gradient, [[slope]], atol=1e-6)


@pytest.mark.parametrize(
    ("sampled", "slope"),
    [
        (0.5, 0.0),  # from the sampler it rose by 0.4, from the old policy by 0.1
        (0.8, -0.9 / 0.8),
        (0.95, -0.9 / 0.8),  # from the sampler it fell
    ],
)
def test_dppo_measures_from_the_policy_that_sampled(sampled: float, slope: float) -> None:
    inputs = [f64([p]).log() for p in (0.9, 0.8)]
    _, gradient = with_gradient(
        lambda *args: dppo_loss(*args, f64([sampled]).log(), divergence="tv", limits=(0.2, 0.2)),
        [*inputs, f64([1.0])],
        keep_of([1], 1),
    )
    assert_close(gradient, [[slope]])


@pytest.mark.parametrize("loss", ACTORS.values(), ids=ACTORS)
@pytest.mark.parametrize("advantage", [2.0, -2.0])
@pytest.mark.parametrize("log_ratio", [89.0, 1e4, -1e4])
def test_a_ratio_beyond_fp32_has_a_finite_loss_and_gradient(
    log_ratio: float, advantage: float, loss: Loss
) -> None:
    logprobs_BT, keep_BT = torch.tensor([[log_ratio - 1e4]]), keep_of([1], 1)
    inputs = [logprobs_BT, torch.tensor([[-1e4]]), torch.tensor([[advantage]])]
    result, gradient = with_gradient(loss, inputs, keep_BT)
    assert isinstance(result, PolicyLoss)
    assert result.loss.isfinite()
    # CISPO and DPPO limit a weight. DPPO masks a good token whose probability rose from 0 to 1.
    limits = {cispo_actor: 1.2, ACTORS["dppo_tv"]: 20.0, ACTORS["dppo_kl"]: 20.0}
    is_masked = loss is not cispo_actor and log_ratio == 1e4 and advantage > 0
    slope = -limits.get(loss, 0.0) * advantage if log_ratio > 0 and not is_masked else 0.0
    assert_close(gradient, [[slope]], atol=1e-6)
    assert math.isfinite(result.approx_kl.value())
    assert result.ratio_max.value() <= math.exp(20.0) * 1.001


def test_approx_kl_of_close_policies_survives_fp32() -> None:
    # log ratio 2^-10 = 0.0009765625, exact beside -8: k3 = x^2 / 2 + x^3 / 6 = 4.769924e-7
    old_BT = torch.tensor([[-8.0]])
    result = actor(old_BT + 2**-10, old_BT, torch.ones(1, 1), keep_of([1], 1))
    assert result.approx_kl.value() == pytest.approx(4.769924e-7, rel=1e-3)


def test_rounding_inside_the_range_never_counts_as_clipped() -> None:
    # old + (new - old) is not always new, above all where new is the smaller
    old_BT, move_BT, returns_BT = (0.1 * normal(20, 500, seed=part) for part in range(3))
    old_BT, returns_BT = old_BT.float(), returns_BT.float()
    new_BT = (old_BT + 0.19 * (9 * move_BT).tanh()).float()
    result = critic(new_BT, old_BT, returns_BT, keep_of([500] * 20, 500))
    assert result.value_clipfrac.value() == 0.0


@quick
@given(loss=losses, keep=keeps(min_rows=2), seed=seeds, size=st.integers(1, 4))
def test_batch_order_and_micro_batches_change_nothing(
    loss: Loss, keep: Tensor, seed: int, size: int
) -> None:
    inputs = random_inputs(loss, keep, seed)
    whole, whole_gradient = with_gradient(loss, inputs, keep)
    order = shuffled(len(keep), seed=seed)
    parts, gradients = zip(
        *(with_gradient(loss, [x[rows] for x in inputs], keep[rows]) for rows in order.split(size)),
        strict=True,
    )
    assert_same(merged(list(parts)), whole)
    assert_close(torch.cat(gradients), whole_gradient[order])


@quick
@given(keep=keeps(), seed=seeds)
def test_every_policy_loss_measures_the_kl_of_its_tokens(keep: Tensor, seed: int) -> None:
    inputs = random_inputs(actor, keep, seed)
    expected = actor(*inputs, keep).approx_kl.value()
    for loss in ACTORS.values():
        assert_close(loss(*inputs, keep).approx_kl.value(), expected)


def test_metrics_carry_no_gradient() -> None:
    keep = keep_of([2], 2)
    for loss in (*ACTORS.values(), critic):
        first, *others = random_inputs(loss, keep, 0)
        for metric in loss(first.requires_grad_(), *others, keep)[1:]:
            assert isinstance(metric, Mean | Maximum)
            number = metric.total if isinstance(metric, Mean) else metric.largest
            assert not number.requires_grad
