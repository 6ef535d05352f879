"""Metrics that merge, and the one rank of a run without ranks."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from rlhf.base.metrics import Maximum, Mean, Metrics, Minimum, Moments, merge_metrics, perplexity
from rlhf.base.ranks import Ranks
from tests.algorithms.padded_batches import (
    f64,
    garbage,
    keeps,
    normal,
    quick,
    seeds,
    shuffled,
    with_garbage,
)
from tests.pretend_cuda.gpu import Gpu

NAN = float("nan")


def all_metrics(values: Tensor, keep: Tensor) -> Metrics:
    """One metric of each kind."""
    return {
        "mean": Mean.of(values, keep),
        "moments": Moments.of(values, keep),
        "maximum": Maximum.of(values, keep),
        "minimum": Minimum.of(values, keep),
    }


def numbers(metrics: Metrics) -> list[float]:
    """The values of metrics, and the deviation of moments."""
    moments = metrics["moments"]
    assert isinstance(moments, Moments)
    return [*(metric.value() for metric in metrics.values()), moments.std()]


def test_mean_by_hand() -> None:
    # (1 + 2) / 2; 30 is not kept
    keep = torch.tensor([True, True, False])
    assert Mean.of(f64(1, 2, 30), keep).value() == 1.5
    assert Mean.of(f64(1, 2, 30)).value() == 11.0


def test_moments_by_hand() -> None:
    # 1 3 5: mean 3, variance (4 + 0 + 4) / 3 = 2.6666667, deviation 1.6329932
    moments = Moments.of(f64(1, 3, 5, NAN), torch.tensor([True, True, True, False]))
    assert moments.value() == moments.mean.item() == 3.0
    assert moments.mean_square.item() == pytest.approx(35 / 3, abs=1e-7)
    assert moments.variance.item() == pytest.approx(2.6666667, abs=1e-7)
    assert moments.std() == pytest.approx(1.6329932, abs=1e-7)


def test_rounding_never_makes_a_variance_negative() -> None:
    for value in (0.3, 1e6 + 0.1, -3e-7):
        deviation = Moments.of(torch.full((6,), value, dtype=torch.float64)).std()
        assert not math.isnan(deviation)
        assert deviation == pytest.approx(0.0, abs=1e-7 * abs(value))


@pytest.mark.parametrize(("kind", "sign"), [(Minimum, 1), (Maximum, -1)])
def test_extremes_by_hand(kind: type[Minimum] | type[Maximum], sign: int) -> None:
    keep = torch.tensor([True, True, False])
    assert kind.of(sign * f64(2, 1, -30), keep).value() == sign
    assert kind.of(sign * f64(1, 2, 30), ~keep & keep).value() == 0.0
    one, other = (kind.of(sign * f64(value), keep[:1]) for value in (1, 3))
    assert (one + other).value() == sign


def test_sums_of_fp32_are_exact() -> None:
    # in fp32 the 1 would vanish beside 1e8
    values = torch.tensor([1e8, 1.0, -1e8])
    assert Mean.of(values).total.item() == 1.0
    assert Moments.of(values).total.item() == 1.0


@quick
@given(keep=keeps(), seed=seeds, value=garbage, extra=st.integers(0, 3))
def test_padding_never_changes_a_metric(keep: Tensor, seed: int, value: float, extra: int) -> None:
    values = normal(*keep.shape, seed=seed)
    dirty = with_garbage(values, keep, value, extra=extra)
    wide = torch.nn.functional.pad(keep, (0, extra))
    assert numbers(all_metrics(dirty, wide)) == pytest.approx(numbers(all_metrics(values, keep)))


@quick
@given(keep=keeps(), seed=seeds, size=st.integers(1, 4))
def test_order_and_parts_never_change_a_metric(keep: Tensor, seed: int, size: int) -> None:
    values = normal(*keep.shape, seed=seed)
    merged: Metrics = {}
    for rows in shuffled(len(keep), seed=seed).split(size):
        merged = merge_metrics(merged, all_metrics(values[rows], keep[rows]))
    assert numbers(merged) == pytest.approx(numbers(all_metrics(values, keep)), abs=1e-9)


def test_merging_needs_the_same_names() -> None:
    with pytest.raises(KeyError, match="sft/loss"):
        merge_metrics({"sft/loss": Mean.of(f64(1))}, {"sft/accuracy": Mean.of(f64(1))})


def test_one_rank_talks_to_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("a collective without ranks")

    for name in ("all_reduce", "barrier"):
        monkeypatch.setattr(torch.distributed, name, fail)
    ranks, tensor = Ranks(), f64(1, 2)
    metrics = all_metrics(tensor, torch.ones(2, dtype=torch.bool))
    assert ranks.is_main
    assert ranks.sum(tensor).tolist() == ranks.max(tensor).tolist() == [1, 2]
    assert ranks.reduce_metrics(metrics) == metrics
    ranks.barrier()


def test_a_sum_over_ranks_leaves_its_input_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda tensor, op: tensor.mul_(2))
    mine = f64(1, 2)
    assert Ranks(rank=1, size=2).sum(mine).tolist() == [2, 4]
    assert mine.tolist() == [1, 2]


def test_collectives_are_on_the_device_of_the_rank(
    gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    devices: list[torch.device] = []
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda x, op: devices.append(x.device))
    here = torch.device("cuda", 0)
    assert Ranks(0, 2, here).sum(f64(1, 2)).device == Ranks(0, 2, here).max(f64(3)).device == here
    assert devices == [here, here]


def test_two_ranks_reduce_metrics_as_a_merge_would(monkeypatch: pytest.MonkeyPatch) -> None:
    # the other rank holds what this one holds, less 1 in every value, when it is asked in turn
    keep = torch.tensor([True, True, False])
    mine, others = all_metrics(f64(1, 4, 9), keep), all_metrics(f64(0, 3, 8), keep)
    asked: list[Any] = []

    def all_reduce(tensor: Tensor, op: Any) -> None:
        asked.append(op)
        if op == torch.distributed.ReduceOp.MAX:
            theirs = torch.stack([others["maximum"].largest, others["minimum"].largest])
            tensor.copy_(torch.maximum(tensor, theirs))
        else:
            mean, moments = others["mean"], others["moments"]
            sums = (mean.total, mean.count, moments.total, moments.square_total, moments.count)
            tensor.add_(torch.stack(sums))

    monkeypatch.setattr(torch.distributed, "all_reduce", all_reduce)
    reduced = Ranks(rank=0, size=2).reduce_metrics(mine)
    assert numbers(reduced) == numbers(merge_metrics(mine, others))
    assert numbers(mine) == numbers(all_metrics(f64(1, 4, 9), keep))
    assert len(asked) == 2


def test_the_perplexity_of_a_diverged_model_is_infinite() -> None:
    assert perplexity(2.0) == math.exp(2.0)
    assert perplexity(709.0) == math.exp(709.0)
    assert perplexity(710.0) == perplexity(math.inf) == math.inf
    assert math.isnan(perplexity(math.nan))
