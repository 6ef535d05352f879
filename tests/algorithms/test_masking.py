"""Positions, sums and whitening under masks."""

import pytest
import torch
from hypothesis import given
from torch import Tensor

from rlhf.algorithms.masking import last_kept_index, masked_sum, whiten
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
    with_garbage,
)


def test_last_kept_by_hand() -> None:
    keep_BT = torch.tensor([[1, 1, 0, 0], [1, 0, 0, 0], [0, 1, 0, 1]]).bool()
    assert last_kept_index(keep_BT).tolist() == [1, 0, 3]


def test_last_kept_needs_a_kept_token_in_every_row() -> None:
    with pytest.raises(ValueError, match="every row must keep at least one token"):
        last_kept_index(torch.tensor([[True, False], [False, False]]))


@quick
@given(keep=keeps(), seed=seeds, value=garbage)
def test_masked_sum_and_its_gradient_see_no_garbage(keep: Tensor, seed: int, value: float) -> None:
    x_BT = normal(*keep.shape, seed=seed)
    dirty_BT = with_garbage(x_BT, keep, value).requires_grad_()
    total = masked_sum(dirty_BT, keep)
    total.backward()
    assert_close(total.detach(), x_BT[keep].sum())
    assert dirty_BT.grad.equal(keep.double())


def test_whiten_of_equal_values_is_zero_and_not_their_rounding() -> None:
    x_BT, keep_BT = torch.full((1, 7), 0.1), keep_of([7], 7)
    result = whiten(x_BT, keep_BT, Moments.of(x_BT, keep_BT))
    assert result.dtype == torch.float32
    assert_close(result, torch.zeros(1, 7), atol=1e-3)


def test_the_constant_under_the_root_is_1e_8() -> None:
    # kept -1e-4 1e-4: mean 0, variance 1e-8; 1e-4 / sqrt(2e-8) = 1 / sqrt(2) = 0.7071068
    x_BT, keep_BT = f64([-1e-4, 1e-4]), keep_of([2], 2)
    result = whiten(x_BT, keep_BT, Moments.of(x_BT, keep_BT))
    assert_close(result, [[-0.7071068, 0.7071068]], atol=1e-7)
