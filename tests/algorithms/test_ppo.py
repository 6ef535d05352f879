"""PPO's two losses."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from rlhf.algorithms.masking import sum_of_row_means
from rlhf.algorithms.ppo import (
    PolicyLoss,
    ValueLoss,
    cispo_loss,
    gspo_loss,
    policy_loss,
    value_loss,
)
from rlhf.base.metrics import Maximum, Mean
from tests.algorithms.padded_batches import (
    assert_close,
    f64,
    garbage,
    keep_of,
    keeps,
    normal,
    quick,
    seeds,
    shuffled,
    with_garbage,
    with_padding,
)

Result = PolicyLoss | ValueLoss
Loss = Callable[..., Result]


def actor(*args: Tensor) -> PolicyLoss:
    """The policy loss at the usual clip range."""
    return policy_loss(*args, cliprange=0.2)


def two_sided_actor(*args: Tensor) -> PolicyLoss:
    """The policy loss with both of its further clips."""
    return policy_loss(*args, cliprange=0.1, cliprange_high=0.3, dual_clip=1.5)


def gspo_actor(*args: Tensor) -> PolicyLoss:
    """GSPO's loss at a narrow clip range."""
    return gspo_loss(*args, cliprange=0.05, cliprange_high=0.1)


def cispo_actor(*args: Tensor) -> PolicyLoss:
    """CISPO's loss with a low limit of the weights."""
    return cispo_loss(*args, cliprange_high=0.2)


ACTORS = [actor, two_sided_actor, gspo_actor, cispo_actor]


def critic(*args: Tensor) -> ValueLoss:
    """The value loss with a clip range."""
    return value_loss(*args, cliprange_value=0.2)


def plain_critic(*args: Tensor) -> ValueLoss:
    """The value loss without a clip range."""
    return value_loss(*args, cliprange_value=None)


losses = st.sampled_from([*ACTORS, critic, plain_critic])


def random_inputs(loss: Loss, keep_BT: Tensor, seed: int) -> list[Tensor]:
    """New and old log-probs and advantages, or new and old values and returns."""
    one, two, three = (normal(*keep_BT.shape, seed=3 * seed + part) for part in range(3))
    old = -one.abs() if loss in ACTORS else one
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
    ("ratio", "advantage", "loss", "clipfrac", "slope"),
    [
        # slope by log pi: -A * ratio, and 0 where the clip holds
        (1.0, +1.0, -1.0, 0.0, -1.0),  # on-policy: plain policy gradient
        (1.5, +1.0, -1.2, 1.0, 0.0),  # good action already raised enough: held at 1 + 0.2
        (0.5, +1.0, -0.5, 0.0, -0.5),  # good action lowered: not clipped
        (0.5, -1.0, +0.8, 1.0, 0.0),  # bad action already lowered enough: held at 1 - 0.2
        (1.5, -1.0, +1.5, 0.0, +1.5),  # bad action raised: not clipped
        (1.1, +2.0, -2.2, 0.0, -2.2),  # inside the range
        (1.5, +0.0, +0.0, 0.0, 0.0),  # neither good nor bad
    ],
)
def test_policy_loss_of_one_token_by_hand(
    ratio: float, advantage: float, loss: float, clipfrac: float, slope: float
) -> None:
    logprobs_BT, old_BT = f64([0.3 * ratio]).log(), f64([0.3]).log()
    inputs, keep_BT = [logprobs_BT, old_BT, f64([advantage])], keep_of([1], 1)
    result, gradient = with_gradient(actor, inputs, keep_BT)
    assert result.loss.item() == pytest.approx(loss, abs=1e-9)
    assert result.clipfrac.value() == clipfrac
    assert_close(gradient, [[slope]])


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "clipfrac", "dual_clipfrac", "slope"),
    [
        # ratios held in [0.8, 1.28], losses of bad tokens at most -3 * A
        (1.25, +1.0, -1.25, 0.0, 0.0, -1.25),  # above 1.2, and still free
        (1.5, +1.0, -1.28, 1.0, 0.0, 0.0),  # held at the upper end of its own
        (0.5, -1.0, +0.8, 1.0, 0.0, 0.0),  # the lower end stays
        (2.5, -1.0, +2.5, 0.0, 0.0, +2.5),  # bad token raised, below the bound
        (4.0, -1.0, +3.0, 0.0, 1.0, 0.0),  # held by the bound: 3 * 1
        (4.0, -0.5, +1.5, 0.0, 1.0, 0.0),  # 3 * 0.5
        (4.0, +1.0, -1.28, 1.0, 0.0, 0.0),  # the bound is for bad tokens alone
        (4.0, +0.0, +0.0, 0.0, 0.0, 0.0),
    ],
)
def test_decoupled_and_dual_clip_of_one_token_by_hand(
    ratio: float,
    advantage: float,
    loss: float,
    clipfrac: float,
    dual_clipfrac: float,
    slope: float,
) -> None:
    inputs = [f64([0.1 * ratio]).log(), f64([0.1]).log(), f64([advantage])]
    result, gradient = with_gradient(
        lambda *args: policy_loss(*args, cliprange=0.2, cliprange_high=0.28, dual_clip=3.0),
        inputs,
        keep_of([1], 1),
    )
    assert isinstance(result, PolicyLoss)
    assert result.loss.item() == pytest.approx(loss, abs=1e-9)
    assert (result.clipfrac.value(), result.dual_clipfrac.value()) == (clipfrac, dual_clipfrac)
    assert_close(gradient, [[slope]])


@pytest.mark.parametrize("loss", ACTORS)
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
    slope = -1.2 * advantage if loss is cispo_actor and log_ratio > 0 else 0.0
    assert_close(gradient, [[slope]], atol=1e-6)
    assert math.isfinite(result.approx_kl.value())
    assert result.ratio_max.value() <= math.exp(20.0) * 1.001


def test_sequences_count_alike_by_hand() -> None:
    # row 0: -1 * (1 + 1.1 + 1.11) / 3 = -1.07; row 1: 2 * 1 = 2; of tokens -3.21 + 2
    logprobs_BT = f64([1.0, 1.1, 1.11], [1.0, math.nan, math.nan]).log()
    keep_BT, old_BT = keep_of([3, 1], 3), torch.zeros(2, 3, dtype=torch.float64)
    inputs = [logprobs_BT, old_BT, f64([1.0] * 3, [-2.0] * 3)]
    per_sequence, gradient = with_gradient(
        lambda *args: policy_loss(*args, cliprange=0.2, total=sum_of_row_means), inputs, keep_BT
    )
    assert_close(per_sequence.loss.detach(), -1.07 + 2.0)
    assert_close(gradient, [[-1 / 3, -1.1 / 3, -1.11 / 3], [2.0, 0.0, 0.0]])
    per_token, _ = with_gradient(actor, inputs, keep_BT)
    assert_close(per_token.loss.detach(), -3.21 + 2.0)
    assert per_sequence.actor_loss.value() == per_token.actor_loss.value()


def test_an_upper_range_of_zero_is_a_range() -> None:
    # ratio 1.1 of a good token, held at 1 + 0
    result = policy_loss(
        f64([0.11]).log(),
        f64([0.1]).log(),
        f64([2.0]),
        keep_of([1], 1),
        cliprange=0.2,
        cliprange_high=0.0,
    )
    assert_close(result.loss, -2.0)


@quick
@given(keep=keeps(), seed=seeds)
def test_without_them_the_further_clips_do_nothing(keep: Tensor, seed: int) -> None:
    inputs = random_inputs(actor, keep, seed)
    plain = actor(*inputs, keep)
    assert plain.dual_clipfrac.value() == 0.0
    assert_same(policy_loss(*inputs, keep, cliprange=0.2, cliprange_high=0.2), plain)
    assert_same(policy_loss(*inputs, keep, cliprange=0.2, dual_clip=1e9), plain)


def test_policy_metrics_by_hand() -> None:
    # ratios 1.5, 0.5 | 1.0; advantages 1, 1 | -2; the rest is dead
    # losses -1.2, -0.5 | 2: sum 0.3, mean 0.1; one of three held; largest ratio 1.5
    # k3 = ratio - 1 - log ratio: 0.5 - 0.4054651 | -0.5 + 0.6931472 | 0: mean 0.0958940
    old_BT = f64([-1, -2, -3], [-4, -5, -6])
    logprobs_BT = old_BT + f64([1.5, 0.5, 9.0], [1.0, 9.0, 9.0]).log()
    result = actor(logprobs_BT, old_BT, f64([1, 1, 9], [-2, 9, 9]), keep_of([2, 1], 3))
    assert_close(result.loss, 0.3)
    assert_close(result.actor_loss.value(), 0.1)
    assert_close(result.clipfrac.value(), 1 / 3)
    assert_close(result.approx_kl.value(), 0.0958940, atol=1e-7)
    assert_close(result.ratio_max.value(), 1.5)


def test_approx_kl_of_close_policies_survives_fp32() -> None:
    # log ratio 2^-10 = 0.0009765625, exact beside -8: k3 = x^2 / 2 + x^3 / 6 = 4.769924e-7
    old_BT = torch.tensor([[-8.0]])
    result = actor(old_BT + 2**-10, old_BT, torch.ones(1, 1), keep_of([1], 1))
    assert result.approx_kl.value() == pytest.approx(4.769924e-7, rel=1e-3)


@pytest.mark.parametrize(
    ("new", "old", "target", "loss", "clipfrac", "slope"),
    [
        # clip range 0.5; slope V - R, and 0 where the clip holds
        (1.0, 0.0, 2.0, 1.125, 1.0, 0.0),  # max(1, (0.5 - 2)^2) / 2: already raised enough
        (1.0, 0.0, 0.0, 0.500, 0.0, 1.0),  # max(1, (0.5 - 0)^2) / 2: wrong way, not clipped
        (-1.0, 0.0, -2.0, 1.125, 1.0, 0.0),  # the same downwards
        (0.25, 0.0, 1.0, 0.28125, 0.0, -0.75),  # inside the range: 0.75^2 / 2
        (3.0, 3.0, 1.0, 2.0, 0.0, 2.0),  # on the old value: 2^2 / 2
    ],
)
def test_value_loss_of_one_token_by_hand(
    new: float, old: float, target: float, loss: float, clipfrac: float, slope: float
) -> None:
    inputs = [f64([new]), f64([old]), f64([target])]
    result, gradient = with_gradient(
        lambda *args: value_loss(*args, cliprange_value=0.5), inputs, keep_of([1], 1)
    )
    assert_close(result.loss.detach(), loss)
    assert result.value_clipfrac.value() == clipfrac
    assert_close(gradient, [[slope]])


def test_value_loss_without_a_clip_range_by_hand() -> None:
    # (1 - 2)^2 / 2, and slope 1 - 2, wherever the old value was
    inputs = [f64([1.0]), f64([0.0]), f64([2.0])]
    result, gradient = with_gradient(plain_critic, inputs, keep_of([1], 1))
    assert_close(result.loss.detach(), 0.5)
    assert result.value_clipfrac.value() == 0.0
    assert_close(gradient, [[-1.0]])


def test_value_metrics_by_hand() -> None:
    # errors 1, 3 | 2 of values near their old ones: (1 + 9 + 4) / 2 = 7 over three tokens
    new_BT = f64([1, 3, 9], [2, 9, 9])
    result = critic(new_BT, new_BT, torch.zeros(2, 3).double(), keep_of([2, 1], 3))
    assert_close(result.loss, 7.0)
    assert_close(result.critic_loss.value(), 7 / 3)
    assert result.value_clipfrac.value() == 0.0


def test_rounding_inside_the_range_never_counts_as_clipped() -> None:
    # old + (new - old) is not always new, above all where new is the smaller
    old_BT, move_BT, returns_BT = (0.1 * normal(20, 500, seed=part) for part in range(3))
    old_BT, returns_BT = old_BT.float(), returns_BT.float()
    new_BT = (old_BT + 0.19 * (9 * move_BT).tanh()).float()
    result = critic(new_BT, old_BT, returns_BT, keep_of([500] * 20, 500))
    assert result.value_clipfrac.value() == 0.0


@quick
@given(keep=keeps(), seed=seeds)
def test_a_wide_clip_range_reduces_to_no_clip(keep: Tensor, seed: int) -> None:
    new, old, returns_BT = random_inputs(critic, keep, seed)
    wide = value_loss(new, old, returns_BT, keep, cliprange_value=1e9)
    assert_same(wide, plain_critic(new, old, returns_BT, keep))
    new, old, advantages_BT = random_inputs(actor, keep, seed)
    wide = policy_loss(new, old, advantages_BT, keep, cliprange=1e9)
    assert_close(wide.loss, -(advantages_BT * (new - old).exp())[keep].sum())
    assert wide.clipfrac.value() == 0.0


@quick
@given(keep=keeps(), seed=seeds)
def test_on_policy_the_gradient_is_the_advantage(keep: Tensor, seed: int) -> None:
    _, old_BT, advantages_BT = random_inputs(actor, keep, seed)
    result, gradient = with_gradient(actor, [old_BT, old_BT, advantages_BT], keep)
    assert_close(gradient, -advantages_BT * keep)
    assert result.approx_kl.value() == result.clipfrac.value() == 0.0
    assert result.ratio_max.value() == 1.0


@quick
@given(loss=losses, keep=keeps(), seed=seeds, value=garbage, extra=st.integers(0, 3))
def test_padding_never_changes_loss_metrics_or_gradient(
    loss: Loss, keep: Tensor, seed: int, value: float, extra: int
) -> None:
    inputs = random_inputs(loss, keep, seed)
    clean, clean_gradient = with_gradient(loss, inputs, keep)
    dirty_inputs = [with_garbage(x, keep, value, extra=extra) for x in inputs]
    dirty, gradient = with_gradient(loss, dirty_inputs, with_padding(keep, extra))
    assert_same(dirty, clean)
    assert_close(gradient, with_padding(clean_gradient, extra))


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
@given(loss=losses, keep=keeps(), seed=seeds)
def test_the_mean_of_a_loss_is_its_sum_over_kept_tokens(
    loss: Loss, keep: Tensor, seed: int
) -> None:
    result = loss(*random_inputs(loss, keep, seed), keep)
    assert isinstance(result[1], Mean)
    assert_close(result[1].value(), result.loss / keep.sum())


def test_metrics_carry_no_gradient() -> None:
    keep = keep_of([2], 2)
    for loss in (*ACTORS, critic):
        first, *others = random_inputs(loss, keep, 0)
        for metric in loss(first.requires_grad_(), *others, keep)[1:]:
            assert isinstance(metric, Mean | Maximum)
            number = metric.total if isinstance(metric, Mean) else metric.largest
            assert not number.requires_grad
