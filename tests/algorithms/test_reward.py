"""Pairwise losses of the reward model."""

from __future__ import annotations

import math
from typing import NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from rlhf.algorithms.reward import (
    build_reward_loss,
    calibration_bins,
    calibration_error,
    classification_loss,
    divergence_loss,
    end_loss,
    end_scores,
)
from rlhf.base.metrics import Mean
from rlhf.base.types import PreferenceBatch, SequenceBatch
from tests.algorithms.padded_batches import (
    assert_close,
    f64,
    keep_of,
    keeps,
    normal,
    quick,
    seeds,
    with_garbage,
)

NAN = float("nan")


class Pairs(NamedTuple):
    """Preference pairs and the values that a reward model gave to their tokens."""

    chosen_values_BS: Tensor
    rejected_values_BS: Tensor
    batch: PreferenceBatch

    def rows(self, rows: Tensor) -> Pairs:
        """Some of the pairs."""
        sides = [SequenceBatch(*(x[rows] for x in side)) for side in self.batch]
        return Pairs(
            self.chosen_values_BS[rows], self.rejected_values_BS[rows], PreferenceBatch(*sides)
        )


def side_of(ids: list[list[int]], attend_BS: Tensor) -> SequenceBatch:
    """Sequences of which every attended token is kept."""
    return SequenceBatch(torch.tensor(ids), attend_BS, attend_BS)


@st.composite
def pairs(draw: st.DrawFn) -> Pairs:
    """Pairs that begin alike, differ in length, and may be equal throughout.

    Padding has ids of its own on each side, and values that are not numbers.
    """
    chosen_BS = draw(keeps())
    width = chosen_BS.shape[1]
    size = st.integers(1, width)
    rejected_BS = keep_of([draw(size) for _ in chosen_BS], width)
    seed = draw(seeds)
    first_BS = normal(*chosen_BS.shape, seed=seed).gt(0).long()
    other_BS = normal(*chosen_BS.shape, seed=seed + 3).gt(0).long()
    second_BS = torch.where(keep_of([draw(size) for _ in chosen_BS], width), first_BS, other_BS)
    sides, values = [], []
    for part, (ids_BS, attend_BS) in enumerate(((first_BS, chosen_BS), (second_BS, rejected_BS))):
        padded_BS = torch.where(attend_BS, ids_BS, 90 + part)
        sides.append(SequenceBatch(padded_BS, attend_BS, attend_BS))
        values_BS = normal(*chosen_BS.shape, seed=seed + part + 1)
        values.append(with_garbage(values_BS, attend_BS, NAN))
    return Pairs(*values, PreferenceBatch(*sides))


def looped_loss(pair: Pairs, margin: float = 0.0, smoothing: float = 0.0) -> float:
    """Divergence loss of one pair, one token after another."""
    (chosen, rejected), values = pair.batch, pair[:2]
    scores, ids = [], []
    for side, row in ((chosen, values[0]), (rejected, values[1])):
        length = int(side.attend_BS.sum())
        scores.append(row[0, :length].tolist())
        ids.append(side.ids_BS[0, :length].tolist())
    if ids[0] == ids[1]:
        return 0.0
    shorter, longer = sorted(map(len, ids))
    alike = [a == b for a, b in zip(*ids, strict=False)]
    start = alike.index(False) if False in alike else shorter
    losses = []
    for t in range(start, longer):
        better, worse = (row[min(t, len(row) - 1)] for row in scores)
        losses.append(looped_end_loss(better, worse, margin, smoothing))
    return sum(losses) / len(losses)


def looped_end_loss(better: float, worse: float, margin: float, smoothing: float) -> float:
    """Loss of one pair of scores, whose label is wrong with the probability ``smoothing``."""
    right, wrong = (math.log(1 + math.exp(margin - sign * (better - worse))) for sign in (1, -1))
    return (1 - smoothing) * right + smoothing * wrong


@pytest.mark.parametrize(
    ("margin", "loss"),
    [
        # -log sigmoid(margin)
        (0.0, 0.6931472),  # -log(1/2)
        (math.log(3), 0.2876821),  # -log(3/4)
        (-math.log(3), 1.3862944),  # -log(1/4)
        (-800.0, 800.0),  # and no overflow
        (800.0, 0.0),
    ],
)
def test_end_loss_by_hand(margin: float, loss: float) -> None:
    assert_close(end_loss(f64(margin + 2), f64(2)), [loss], atol=1e-7)


def test_a_real_token_with_the_padding_id_still_differs() -> None:
    # ids 7 0 against 7: token 1 is an end token that is also the padding: margin log 3
    chosen = side_of([[7, 0]], keep_of([2], 2))
    rejected = side_of([[7, 0]], keep_of([1], 2))
    result = divergence_loss(
        f64([0, math.log(3)]), f64([0, NAN]), PreferenceBatch(chosen, rejected)
    )
    assert_close(result, [0.2876821], atol=1e-7)


@quick
@given(pairs=pairs(), seed=seeds, smoothing=st.sampled_from([0.0, 0.1, 0.4]))
def test_margins_and_smoothing_agree_with_a_loop(pairs: Pairs, seed: int, smoothing: float) -> None:
    margin_B = normal(len(pairs.chosen_values_BS), seed=seed).abs()
    rows = [pairs.rows(torch.tensor([i])) for i in range(len(margin_B))]
    margins = margin_B.tolist()
    values = [values_BS.clone().requires_grad_() for values_BS in pairs[:2]]
    found_B = divergence_loss(*values, pairs.batch, margin_B, label_smoothing=smoothing)
    for slope_BS, side in zip(torch.autograd.grad(found_B.sum(), values), pairs.batch, strict=True):
        assert slope_BS.isfinite().all()
        assert not slope_BS[~side.attend_BS].any(), "padding has no gradient"
    expected = [looped_loss(*each, smoothing) for each in zip(rows, margins, strict=True)]
    assert_close(found_B.detach(), expected)
    ends = [
        end_scores(values_BS, side.attend_BS)
        for values_BS, side in zip(pairs[:2], pairs.batch, strict=True)
    ]
    columns = (*(each.tolist() for each in ends), margins)
    expected = [looped_end_loss(*each, smoothing) for each in zip(*columns, strict=True)]
    assert_close(end_loss(*ends, margin_B, label_smoothing=smoothing), expected)


def test_far_scores_have_a_finite_cross_entropy() -> None:
    assert_close(classification_loss(f64(1000, -1000, 1000), f64(1, 1, 0)), [0, 1000, 1000])


@quick
@given(seed=seeds, count=st.integers(1, 40), size=st.integers(1, 7))
def test_calibration_error_agrees_with_a_loop(seed: int, count: int, size: int) -> None:
    margin_B = 2 * normal(count, seed=seed)
    keep_B = normal(count, seed=seed + 1) > -1
    found: dict[str, Mean] = {}
    for part in range(0, count, size):
        rows = slice(part, part + size)
        bins = calibration_bins(margin_B[rows], keep_B[rows])
        found = {name: found[name] + mean for name, mean in bins.items()} if found else bins
    kept = [m for m, keep in zip(margin_B.tolist(), keep_B.tolist(), strict=True) if keep]
    error = 0.0
    for low in range(50, 100, 5):
        sure = [(1 / (1 + math.exp(-abs(m))), m > 0) for m in kept]
        inside = [(c, right) for c, right in sure if low <= 100 * c < low + 5]
        if inside:
            gap = sum(c for c, _ in inside) - sum(right for _, right in inside)
            error += abs(gap) / len(kept)
    assert calibration_error(found) == pytest.approx(error, abs=1e-9)


def test_weighted_summary_by_hand() -> None:
    # 0.1 * 2 + 1.3 * 0 + 0.7 * 0.5; the means see the first and the last pair, each as one
    result = build_reward_loss(f64(0.1, 1.3, 0.7), f64(3, 1, 2), f64(1, 2, 2), f64(2, 0, 0.5))
    assert_close(result.loss, 0.55)
    assert_close(result.mean_loss.value(), 0.4)
    assert_close(result.accuracy.value(), 0.5)
    assert_close(result.margin.value(), 1.0)
    assert_close(result.chosen_score.value(), 2.5)
    assert_close(result.rejected_score.value(), 1.5)
    assert result.margin.count == 2
    plain = build_reward_loss(f64(0.1, 1.3, 0.7), f64(3, 1, 2), f64(1, 2, 2))
    assert_close(plain.loss, 2.1)
    assert plain.margin.count == 3
