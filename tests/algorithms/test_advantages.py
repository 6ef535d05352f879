"""Scores, rewards and advantages."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from rlhf.algorithms.advantages import (
    Advantages,
    clip_scores,
    gae,
    grpo_advantages,
    reinforce_pp_advantages,
    rloo_advantages,
    scale_scores,
    token_rewards,
)
from rlhf.base.metrics import Moments
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

NAN = float("nan")
shares = st.floats(0.0, 1.0)


def test_scores_by_hand() -> None:
    # clip 5, penalty 1: the penalty comes after the clip
    ended_B = torch.tensor([True, True, True, False, False, False])
    result = clip_scores(f64(3, 7, -7, 3, 7, -7), ended_B, clip=5.0, missing_end_penalty=1.0)
    assert_close(result, [3, 5, -5, 2, 4, -6])


def test_scores_without_a_clip_by_hand() -> None:
    ended_B = torch.tensor([True, False])
    result = clip_scores(f64(70, -70), ended_B, clip=None, missing_end_penalty=1.0)
    assert_close(result, [70, -71])
    at_0 = clip_scores(f64(70, -70), ended_B, clip=0.0, missing_end_penalty=1.0)
    assert_close(at_0, [0, -1])


def test_a_missing_end_score_takes_the_place_of_the_score_by_hand() -> None:
    # neither clipped at 5 nor less the penalty; zero is a score as well
    ended_B = torch.tensor([True, False, False])
    for instead in (-9.0, 0.0):
        result = clip_scores(
            f64(7, 7, -3), ended_B, clip=5.0, missing_end_penalty=1.0, missing_end_score=instead
        )
        assert_close(result, [5, instead, instead])


@pytest.mark.parametrize(
    ("shift_mean", "expected"),
    [
        # seen 1, 3, 5, 7: mean 4, variance (9 + 1 + 1 + 9) / 4 = 5, deviation 2.2360680
        (False, [0.8944272, -0.4472136, 1.7888544]),  # 2, -1, 4 over the deviation
        (True, [-0.8944272, -2.2360680, 0.0]),  # -2, -5, 0 over the deviation
    ],
)
def test_scaled_scores_by_hand(shift_mean: bool, expected: list[float]) -> None:
    moments = Moments.of(f64(1, 3)) + Moments.of(f64(5, 7))
    assert_close(scale_scores(f64(2, -1, 4), moments, shift_mean=shift_mean), expected, atol=1e-7)


@pytest.mark.parametrize("seen", [f64(3, 3), f64(3, 3 + 1e-6), f64(1)])
def test_equal_scores_scale_nothing(seen: Tensor) -> None:
    result = scale_scores(torch.tensor([3.0]), Moments.of(seen), shift_mean=False)
    assert result.dtype == torch.float32
    assert_close(result, [3.0])


def test_scores_keep_their_type() -> None:
    result = clip_scores(torch.ones(1), torch.tensor([False]), clip=5.0, missing_end_penalty=1.0)
    assert result.dtype == torch.float32


def test_rewards_by_hand() -> None:
    # row 0: -0.1 * 0.5, -0.1 * -0.25, -0.1 * 1 + 2; row 1: -0.1 * 3 - 1, then nothing
    kl_BT, keep_BT = f64([0.5, -0.25, 1.0], [3.0, NAN, NAN]), keep_of([3, 1], 3)
    result = token_rewards(kl_BT, f64(2, -1), keep_BT, kl_ctl=0.1)
    assert_close(result, [[-0.05, 0.025, 1.9], [-1.3, 0, 0]])


def test_rewards_leave_their_input_alone() -> None:
    kl_BT = f64([0.5, 1.0])
    token_rewards(kl_BT, f64(2), keep_of([2], 2), kl_ctl=0.1)
    assert kl_BT.tolist() == [[0.5, 1.0]]


@quick
@given(keep=keeps(), seed=seeds, kl_ctl=shares)
def test_rewards_of_a_response_sum_to_its_score_less_the_price(
    keep: Tensor, seed: int, kl_ctl: float
) -> None:
    kl_BT, scores_B = normal(*keep.shape, seed=seed), normal(len(keep), seed=seed + 1)
    result = token_rewards(kl_BT, scores_B, keep, kl_ctl=kl_ctl)
    assert_close(result.sum(dim=1), scores_B - kl_ctl * (kl_BT * keep).sum(dim=1))


@quick
@given(keep=keeps(), seed=seeds, value=garbage, extra=st.integers(0, 3))
def test_padding_never_changes_rewards(keep: Tensor, seed: int, value: float, extra: int) -> None:
    kl_BT, scores_B = normal(*keep.shape, seed=seed), normal(len(keep), seed=seed + 1)
    clean = token_rewards(kl_BT, scores_B, keep, kl_ctl=0.1)
    dirty_BT, wide_BT = with_garbage(kl_BT, keep, value, extra=extra), with_padding(keep, extra)
    dirty = token_rewards(dirty_BT, scores_B, wide_BT, kl_ctl=0.1)
    assert dirty.equal(with_padding(clean, extra))


def test_gae_by_hand() -> None:
    # gamma 0.9, lam 0.5, so gamma * lam = 0.45; row 0 from its end:
    #   delta_2 = 2 + 0.9 * 0 - 1.5 = 0.5     A_2 = 0.5
    #   delta_1 = 0 + 0.9 * 1.5 - 1 = 0.35    A_1 = 0.35 + 0.45 * 0.5   = 0.575
    #   delta_0 = 1 + 0.9 * 1 - 0.5 = 1.4     A_0 = 1.4  + 0.45 * 0.575 = 1.65875
    # row 1: A_0 = delta_0 = 3 + 0.9 * 0 - 1 = 2
    rewards_BT = f64([1.0, 0.0, 2.0], [3.0, NAN, NAN])
    values_BT = f64([0.5, 1.0, 1.5], [1.0, NAN, NAN])
    result = gae(rewards_BT, values_BT, keep_of([3, 1], 3), gamma=0.9, lam=0.5)
    assert_close(result.advantages_BT, [[1.65875, 0.575, 0.5], [2, 0, 0]])
    assert_close(result.returns_BT, [[2.15875, 1.575, 2.0], [3, 0, 0]])


@quick
@given(keep=keeps(), seed=seeds, gamma=shares)
def test_gae_with_lam_1_reduces_to_discounted_rewards_to_go(
    keep: Tensor, seed: int, gamma: float
) -> None:
    rewards_BT = normal(*keep.shape, seed=seed) * keep
    returns_BT = gae(rewards_BT, normal(*keep.shape, seed=seed + 1), keep, gamma=gamma, lam=1.0)[1]
    for t in range(keep.shape[1]):
        discounts_T = gamma ** torch.arange(keep.shape[1] - t, dtype=torch.float64)
        to_go_B = (rewards_BT[:, t:] * discounts_T).sum(dim=1)
        assert_close(returns_BT[:, t], to_go_B * keep[:, t])


@quick
@given(keep=keeps(), seed=seeds, gamma=shares)
def test_gae_with_lam_0_reduces_to_one_step_errors(keep: Tensor, seed: int, gamma: float) -> None:
    rewards_BT, values_BT = normal(*keep.shape, seed=seed), normal(*keep.shape, seed=seed + 1)
    next_values_BT = with_padding(values_BT * keep, 1)[:, 1:]
    result = gae(rewards_BT, values_BT, keep, gamma=gamma, lam=0.0)
    assert_close(result.advantages_BT, (rewards_BT + gamma * next_values_BT - values_BT) * keep)


@quick
@given(keep=keeps(), seed=seeds, gamma=shares, lam=shares)
def test_gae_is_the_sum_of_discounted_errors(
    keep: Tensor, seed: int, gamma: float, lam: float
) -> None:
    """Eq. 16 of the paper as it stands: A_t = sum over l of (gamma * lam)^l * delta_{t + l}."""
    rewards_BT, values_BT = normal(*keep.shape, seed=seed), normal(*keep.shape, seed=seed + 1)
    delta_BT = gae(rewards_BT, values_BT, keep, gamma=gamma, lam=0.0).advantages_BT
    result = gae(rewards_BT, values_BT, keep, gamma=gamma, lam=lam)
    for t in range(keep.shape[1]):
        weights_T = (gamma * lam) ** torch.arange(keep.shape[1] - t, dtype=torch.float64)
        expected_B = (delta_BT[:, t:] * weights_T).sum(dim=1)
        assert_close(result.advantages_BT[:, t], expected_B * keep[:, t])


@quick
@given(keep=keeps(), seed=seeds, value=garbage, extra=st.integers(0, 3))
def test_padding_never_changes_advantages(
    keep: Tensor, seed: int, value: float, extra: int
) -> None:
    rewards_BT, values_BT = normal(*keep.shape, seed=seed), normal(*keep.shape, seed=seed + 1)
    clean = gae(rewards_BT, values_BT, keep, gamma=0.9, lam=0.95)
    dirty = gae(
        with_garbage(rewards_BT, keep, value, extra=extra),
        with_garbage(values_BT, keep, value, extra=extra),
        with_padding(keep, extra),
        gamma=0.9,
        lam=0.95,
    )
    assert_close(dirty.advantages_BT, with_padding(clean.advantages_BT, extra))
    assert_close(dirty.returns_BT, with_padding(clean.returns_BT, extra))


@quick
@given(keep=keeps(), seed=seeds)
def test_batch_order_and_parts_change_nothing(keep: Tensor, seed: int) -> None:
    kl_BT, values_BT = normal(*keep.shape, seed=seed), normal(*keep.shape, seed=seed + 1)
    scores_B, ended_B = normal(len(keep), seed=seed + 2, scale=4.0), keep[:, -1]

    def chain(rows: Tensor) -> tuple[Tensor, Tensor]:
        scores = clip_scores(scores_B[rows], ended_B[rows], clip=5.0, missing_end_penalty=1.0)
        rewards = token_rewards(kl_BT[rows], scores, keep[rows], kl_ctl=0.1)
        return gae(rewards, values_BT[rows], keep[rows], gamma=0.9, lam=0.95)

    order = shuffled(len(keep), seed=seed)
    whole = chain(torch.arange(len(keep)))
    parts = [chain(row) for row in order.split(1)]
    for whole_BT, *part_BT in zip(whole, *parts, strict=True):
        assert_close(torch.cat(part_BT), whole_BT[order])


# two prompts, two responses each; totals 2 and 1, then -1 and 3
GROUP_REWARDS = f64([0.5, 1.5, NAN], [1.0, NAN, NAN], [-1.5, 0.25, 0.25], [3.0, NAN, NAN])
GROUP_KEEP = keep_of([2, 1, 3, 1], 3)
TO_GO = [[2.0, 1.5, 0], [1, 0, 0], [-1.0, 0.5, 0.25], [3, 0, 0]]


def test_rloo_by_hand() -> None:
    # each less the other of its prompt: 2 - 1, 1 - 2, -1 - 3, 3 - -1
    result = rloo_advantages(GROUP_REWARDS, GROUP_KEEP, group_size=2)
    assert_close(result.advantages_BT, [[1, 1, 0], [-1, 0, 0], [-4, -4, -4], [4, 0, 0]])
    assert_close(result.returns_BT, TO_GO)


def test_rloo_of_four_by_hand() -> None:
    # the others' means: (1 - 1 + 3) / 3 = 1, (2 - 1 + 3) / 3 = 4/3, 6/3 = 2, 2/3
    result = rloo_advantages(GROUP_REWARDS, GROUP_KEEP, group_size=4)
    assert_close(result.advantages_BT[:, 0], [1, -1 / 3, -3, 7 / 3])


def test_grpo_by_hand() -> None:
    # means 1.5 and 1; sample deviations sqrt(0.5 / 1) = 0.7071068 and sqrt(8 / 1) = 2.8284271:
    # 0.5 / 0.7071078 = 0.7071058 and 2 / 2.8284281 = 0.7071065
    result = grpo_advantages(GROUP_REWARDS, GROUP_KEEP, group_size=2)
    a, b = 0.7071058, 0.7071065
    assert_close(result.advantages_BT, [[a, a, 0], [-a, 0, 0], [-b, -b, -b], [b, 0, 0]], atol=1e-7)
    assert_close(result.returns_BT, TO_GO)


def test_reinforce_pp_by_hand() -> None:
    # gamma 0.5: 0.5 + 0.75, 1.5 | 1 | -1.5 + 0.125 + 0.0625, 0.25 + 0.125, 0.25 | 3
    result = reinforce_pp_advantages(GROUP_REWARDS, GROUP_KEEP, gamma=0.5)
    expected = [[1.25, 1.5, 0], [1, 0, 0], [-1.3125, 0.375, 0.25], [3, 0, 0]]
    assert_close(result.advantages_BT, expected)
    assert_close(result.returns_BT, expected)


@pytest.mark.parametrize("estimator", [rloo_advantages, grpo_advantages])
@pytest.mark.parametrize("group_size", [3, 1, 0])
def test_rows_must_make_groups(estimator: Callable[..., Advantages], group_size: int) -> None:
    message = f"4 rows do not make groups of {group_size}; a group has 2 or more"
    with pytest.raises(ValueError, match=message):
        estimator(GROUP_REWARDS, GROUP_KEEP, group_size=group_size)


@pytest.mark.parametrize("estimator", [rloo_advantages, grpo_advantages])
def test_equal_responses_have_no_advantage_in_fp32(estimator: Callable[..., Advantages]) -> None:
    """The mean of three equal fp32 numbers is not always the number; the deviation is tiny too."""
    rewards_BT = (7 * torch.rand(300, 1, generator=torch.Generator().manual_seed(0))).repeat(1, 4)
    rewards_BT = rewards_BT.repeat_interleave(3, dim=0)
    result = estimator(rewards_BT, torch.ones_like(rewards_BT).bool(), group_size=3)
    assert result.advantages_BT.dtype == torch.float32
    assert result.advantages_BT.abs().max() < 1e-6


@quick
@given(keep=keeps(), seed=seeds, scale=st.floats(0.1, 10.0), shift=st.floats(-5.0, 5.0))
def test_group_advantages_forget_shift_and_grpo_forgets_scale(
    keep: Tensor, seed: int, scale: float, shift: float
) -> None:
    keep = keep.repeat(2, 1)
    rewards_BT = normal(*keep.shape, seed=seed) * keep
    moved_BT = scale * rewards_BT
    moved_BT[:, 0] += shift
    rloo, moved_rloo = (rloo_advantages(x, keep, group_size=2)[0] for x in (rewards_BT, moved_BT))
    assert_close(moved_rloo, scale * rloo)
    grpo, moved_grpo = (grpo_advantages(x, keep, group_size=2)[0] for x in (rewards_BT, moved_BT))
    assert_close(moved_grpo, grpo, atol=1e-3)
    assert_close(rloo[::2, 0] + rloo[1::2, 0], torch.zeros(len(keep) // 2))


@quick
@given(keep=keeps(), seed=seeds, value=garbage, extra=st.integers(0, 3))
def test_padding_never_changes_advantages_without_a_critic(
    keep: Tensor, seed: int, value: float, extra: int
) -> None:
    keep = keep.repeat(2, 1)
    rewards_BT = normal(*keep.shape, seed=seed)
    dirty_BT, wide_BT = (
        with_garbage(rewards_BT, keep, value, extra=extra),
        with_padding(keep, extra),
    )
    for estimate in (
        partial(rloo_advantages, group_size=2),
        partial(grpo_advantages, group_size=2),
        partial(reinforce_pp_advantages, gamma=0.9),
    ):
        clean, dirty = estimate(rewards_BT, keep), estimate(dirty_BT, wide_BT)
        assert_close(dirty.advantages_BT, with_padding(clean.advantages_BT, extra))
        assert_close(dirty.returns_BT, with_padding(clean.returns_BT, extra))
