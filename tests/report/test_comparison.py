"""Comparisons: seeds fold into means, and a difference is told only where the interval tells it."""

from __future__ import annotations

import math
import random
from pathlib import Path

import pytest

from rlhf.base.intervals import t_quantile
from rlhf.report.comparison import (
    ComparedRun,
    Setting,
    comparison_json,
    difference,
    group_by_setting,
)


def run(kl_ctl: float, seed: int, **measures: float) -> ComparedRun:
    keys = {"seed": seed, "ppo.kl_ctl": kl_ctl, "ppo.lam": 0.95}
    return ComparedRun(Path(f"{kl_ctl}-{seed}"), keys, measures)


def setting(values: dict[int, float]) -> Setting:
    return Setting({}, [run(0.1, seed, gold=value) for seed, value in values.items()])


def test_runs_that_differ_in_the_seed_are_one_setting() -> None:
    runs = [run(kl, seed, gold=kl + seed) for kl in (0.1, 0.2) for seed in (1, 2)]
    first, second = group_by_setting([*runs, run(0.2, 3)])
    assert (first.values, second.values) == ({"ppo.kl_ctl": 0.1}, {"ppo.kl_ctl": 0.2})
    assert first.label == "ppo.kl_ctl=0.1"
    assert [len(second.runs), len(second.finished_runs())] == [3, 2]
    assert second.estimates()["gold"].mean == pytest.approx(1.7)
    (only,) = group_by_setting(runs[:2])
    assert only.label == "all"
    unfinished = comparison_json([second])["settings"][0]["unfinished"]
    assert unfinished == ["0.2-3"]


def test_seeds_in_common_are_compared_in_pairs() -> None:
    noisy = {1: 0.1, 2: 0.5, 3: 0.9}
    more = {s: v + 0.048 + s / 1000 for s, v in noisy.items()}
    found = difference(setting(noisy), setting(more), "gold")
    assert found.verdict == "higher"
    assert found.estimate.mean == pytest.approx(0.05)
    lower = difference(setting(more), setting(noisy), "gold")
    assert lower.verdict == "lower"


def test_other_seeds_are_compared_by_welch() -> None:
    # Worked by hand: means 2 and 7, variances 1 and 4, standard error sqrt(1/3 + 4/3), degrees of
    # freedom (1/3 + 4/3)^2 / ((1/3)^2 / 2 + (4/3)^2 / 2) = 50 / 17; between 4.303 of 2 degrees and
    # 3.182 of 3.
    found = difference(setting({1: 1.0, 2: 2.0, 3: 3.0}), setting({4: 5.0, 5: 7.0, 6: 9.0}), "gold")
    assert found.estimate.mean == 5.0
    assert found.estimate.half == pytest.approx(t_quantile(50 / 17) * math.sqrt(5 / 3))
    assert 3.182 < found.estimate.half / math.sqrt(5 / 3) < 3.3
    assert found.verdict == "higher"


@pytest.mark.parametrize("others", [{1: 0.9}, {2: 0.9}, {2: 0.9, 3: 0.9}])
def test_one_seed_tells_nothing(others: dict[int, float]) -> None:
    found = difference(setting({1: 0.1}), setting(others), "gold")
    assert found.verdict == "one seed"


@pytest.mark.parametrize("seeds", [(1, 2), (3, 4)])
def test_seeds_without_spread_tell_nothing(seeds: tuple[int, int]) -> None:
    ones, twos = setting({1: 0.1, 2: 0.1}), setting(dict.fromkeys(seeds, 0.3))
    found = difference(ones, twos, "gold")
    assert found.verdict == "no spread"
    assert math.isnan(found.estimate.half)
    same = difference(ones, setting(dict.fromkeys(seeds, 0.1)), "gold")
    assert same.verdict == "-"


@pytest.mark.parametrize("shared", [True, False])
def test_equal_settings_are_called_different_in_one_of_twenty(shared: bool) -> None:
    draws, told = random.Random(7), 0
    for _ in range(400):
        prefix = [draws.gauss(0, 1) if shared else 0.0 for _ in range(3)]
        first = {s: prefix[s] + draws.gauss(0, 1) for s in range(3)}
        place = 0 if shared else 10
        other = {place + s: prefix[s] + draws.gauss(0, 1) for s in range(3)}
        told += difference(setting(first), setting(other), "gold").verdict != "-"
    assert told / 400 < 0.08
