"""Scores, rewards and advantages."""

from collections.abc import Callable

import pytest
import torch
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
    keep_of,
)

NAN = float("nan")


def test_scores_by_hand() -> None:
    # clip 5, penalty 1: the penalty comes after the clip
    ended_B = torch.tensor([True, True, True, False, False, False])
    scores_B = f64(3, 7, -7, 3, 7, -7)
    for clip, expected in (
        (5.0, [3, 5, -5, 2, 4, -6]),
        (None, [3, 7, -7, 2, 6, -8]),
        (0.0, [0, 0, 0, -1, -1, -1]),
    ):
        assert_close(clip_scores(scores_B, ended_B, clip=clip, missing_end_penalty=1.0), expected)
    single = clip_scores(torch.ones(1), torch.tensor([False]), clip=5.0, missing_end_penalty=1.0)
    assert single.dtype == torch.float32


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


def test_rewards_by_hand() -> None:
    # row 0: -0.1 * 0.5, -0.1 * -0.25, -0.1 * 1 + 2; row 1: -0.1 * 3 - 1, then nothing
    kl_BT, keep_BT = f64([0.5, -0.25, 1.0], [3.0, NAN, NAN]), keep_of([3, 1], 3)
    result = token_rewards(kl_BT, f64(2, -1), keep_BT, kl_ctl=0.1)
    assert_close(result, [[-0.05, 0.025, 1.9], [-1.3, 0, 0]])
    assert kl_BT[0].tolist() == [0.5, -0.25, 1.0], "the input stays"


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


# two prompts, two responses each; totals 2 and 1, then -1 and 3
GROUP_REWARDS = f64([0.5, 1.5, NAN], [1.0, NAN, NAN], [-1.5, 0.25, 0.25], [3.0, NAN, NAN])
GROUP_KEEP = keep_of([2, 1, 3, 1], 3)
TO_GO = [[2.0, 1.5, 0], [1, 0, 0], [-1.0, 0.5, 0.25], [3, 0, 0]]


def test_rloo_of_four_by_hand() -> None:
    # the others' means: (1 - 1 + 3) / 3 = 1, (2 - 1 + 3) / 3 = 4/3, 6/3 = 2, 2/3
    result = rloo_advantages(GROUP_REWARDS, GROUP_KEEP, group_size=4)
    assert_close(result.advantages_BT[:, 0], [1, -1 / 3, -3, 7 / 3])
    assert_close(result.returns_BT, TO_GO)


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
