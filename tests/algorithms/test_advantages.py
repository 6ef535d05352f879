"""Scores, rewards and advantages; test_against_reference.py compares the estimators with loops."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from rlhf.algorithms.advantages import (
    Advantages,
    clip_scores,
    grpo_advantages,
    rloo_advantages,
    scale_scores,
    token_rewards,
)
from rlhf.base.metrics import Moments
from tests.algorithms.padded_batches import assert_close, f64, keep_of

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


@pytest.mark.parametrize("estimator", [rloo_advantages, grpo_advantages])
@pytest.mark.parametrize("group_size", [3, 1, 0])
def test_rows_must_make_groups(estimator: Callable[..., Advantages], group_size: int) -> None:
    message = f"4 rows do not divide into groups of {group_size}, of 2 or more"
    with pytest.raises(ValueError, match=message):
        estimator(torch.zeros(4, 3), keep_of([2, 1, 3, 1], 3), group_size=group_size)


@pytest.mark.parametrize("estimator", [rloo_advantages, grpo_advantages])
def test_equal_responses_have_no_advantage_in_fp32(estimator: Callable[..., Advantages]) -> None:
    """The mean of three equal fp32 numbers is not always the number; the deviation is tiny too."""
    rewards_BT = (7 * torch.rand(300, 1, generator=torch.Generator().manual_seed(0))).repeat(1, 4)
    rewards_BT = rewards_BT.repeat_interleave(3, dim=0)
    result = estimator(rewards_BT, torch.ones_like(rewards_BT).bool(), group_size=3)
    assert result.advantages_BT.dtype == torch.float32
    assert result.advantages_BT.abs().max() < 1e-6
