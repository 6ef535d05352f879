"""Comparisons: seeds fold into means, and a difference is told only where the interval tells it."""

from __future__ import annotations

import io
import json
import math
import random
import re
from collections.abc import Callable
from itertools import product
from pathlib import Path

import pytest

from rlhf.base.finite_numbers import format_json
from rlhf.base.intervals import t_quantile
from rlhf.config.freeze import to_run_config, write_frozen_config
from rlhf.report.compare_runs import comparison_table, legend_lines, note_lines
from rlhf.report.comparison import (
    ComparedRun,
    Setting,
    find_run_folders,
    group_runs_by_setting,
    read_compared_run,
)
from rlhf.report.differences import (
    compare_with_first,
    comparison_json,
    estimate_difference,
    keep_significant,
)
from rlhf.run.console import Console
from tests.conftest import Compose
from tests.documents import read_document


def run(kl_ctl: float, seed: int, **measures: float) -> ComparedRun:
    keys = {"seed": seed, "ppo.kl_ctl": kl_ctl, "ppo.lam": 0.95}
    return ComparedRun(Path(f"{kl_ctl}-{seed}"), keys, measures)


def setting(values: dict[int, float]) -> Setting:
    return Setting({}, [run(0.1, seed, gold=value) for seed, value in values.items()])


def test_runs_that_differ_in_the_seed_are_one_setting() -> None:
    runs = [run(kl, seed, gold=kl + seed) for kl in (0.1, 0.2) for seed in (1, 2)]
    first, second = group_runs_by_setting([*runs, run(0.2, 3)])
    assert (first.values, second.values) == ({"ppo.kl_ctl": 0.1}, {"ppo.kl_ctl": 0.2})
    assert first.label == "ppo.kl_ctl=0.1"
    assert [len(second.runs), len(second.finished_runs())] == [3, 2]
    assert second.estimates()["gold"].mean == pytest.approx(1.7)
    (only,) = group_runs_by_setting(runs[:2])
    assert only.label == "all"
    stored = comparison_json([second], compare_with_first([second]))
    assert stored["settings"][0]["unfinished"] == ["0.2-3"]


def test_seeds_of_one_sft_and_reward_model_are_one_setting_and_say_so() -> None:
    """Seeds are paired only if the data have the same seed too."""
    own = [run(0.1, seed, gold=seed) for seed in (1, 2, 3)]
    child = [
        each._replace(keys=each.keys | {"data.seed": 1 if seed > 1 else None}, origin="runs/R")
        for seed, each in enumerate(own, 1)
    ]
    (shared,) = group_runs_by_setting(child)
    assert (shared.label, [each.seeds for each in shared.runs]) == ("all", [(1, 1), (2, 1), (3, 1)])
    both = [Setting({}, own), shared._replace(values={})]
    assert estimate_difference(*both, "gold").estimate.size == 6, "not pairs"
    (told,) = (line for line in note_lines(both, compare_with_first(both)) if "share" in line)
    assert told.startswith("Runs of setting 2 share all phases but the last, from runs/R: ")
    apart = Setting({}, [each._replace(origin=f"runs/{each.seeds[0]}") for each in own])
    assert apart.shared_origins() == []


def test_a_part_that_one_run_has_is_shown_without_its_defaults() -> None:
    part = {"kind": "length", "weight": 1.0, "most": 6, "least": 0, "files": [], "pattern": None}
    with_part = {f"rewards.brief.{name}": value for name, value in part.items()}
    runs = [
        ComparedRun(Path(f"run-{place}"), {"seed": 1, **keys}, {})
        for place, keys in enumerate([{}, with_part, with_part | {"rewards.brief.least": 2}])
    ]
    labels = [setting.label for setting in group_runs_by_setting(runs)]
    brief = "rewards.brief.kind=length rewards.brief.most=6"
    assert labels == ["all", brief, f"{brief} rewards.brief.least=2"]
    both = [setting.label for setting in group_runs_by_setting(runs[1:])]
    assert both == ["rewards.brief.least=0", "rewards.brief.least=2"]


def test_runs_that_share_the_seed_too_are_not_seeds_of_one_setting() -> None:
    before, after = ([run(0.1, seed, gold=gold) for seed in (1, 2)] for gold in (0.5, 0.7))
    first, second = group_runs_by_setting([*before, *after])
    assert (first.label, second.label) == ("all", "repeat=2")
    assert (first.runs, second.runs) == (before, after)


def test_seeds_in_common_are_compared_in_pairs() -> None:
    noisy = {1: 0.1, 2: 0.5, 3: 0.9}
    more = {s: v + 0.048 + s / 1000 for s, v in noisy.items()}
    found = estimate_difference(setting(noisy), setting(more), "gold")
    assert found.verdict == "higher"
    assert found.estimate.mean == pytest.approx(0.05)
    lower = estimate_difference(setting(more), setting(noisy), "gold")
    assert lower.verdict == "lower"


def test_other_seeds_are_compared_by_welch() -> None:
    # Worked by hand: means 2 and 7, variances 1 and 4, standard error sqrt(1/3 + 4/3), degrees of
    # freedom (1/3 + 4/3)^2 / ((1/3)^2 / 2 + (4/3)^2 / 2) = 50 / 17; between 4.303 of 2 degrees and
    # 3.182 of 3.
    first, other = setting({1: 1.0, 2: 2.0, 3: 3.0}), setting({4: 5.0, 5: 7.0, 6: 9.0})
    found = estimate_difference(first, other, "gold")
    assert found.estimate.mean == 5.0
    assert found.estimate.half == pytest.approx(t_quantile(50 / 17) * math.sqrt(5 / 3))
    assert 3.182 < found.estimate.half / math.sqrt(5 / 3) < 3.3
    assert found.verdict == "higher"


@pytest.mark.parametrize(
    ("ours", "others", "verdict"),
    [
        ({1: 0.1}, {1: 0.9}, "one seed"),
        ({1: 0.1}, {2: 0.9, 3: 0.9}, "one seed"),
        ({1: 0.1, 2: 0.1001}, {1: 0.9, 2: 0.9}, "two seeds"),
        ({1: 0.1, 2: 0.1001}, {3: 0.9, 4: 0.9, 5: 0.9}, "two seeds"),
    ],
)
def test_fewer_than_three_seeds_tell_nothing(
    ours: dict[int, float], others: dict[int, float], verdict: str
) -> None:
    found = estimate_difference(setting(ours), setting(others), "gold")
    assert found.verdict == verdict
    assert math.isnan(found.estimate.half)
    assert math.isnan(setting(ours).estimates()["gold"].half)
    table = [setting(ours), setting(others)]
    compared = compare_with_first(table)
    tried, note = note_lines(table, compared)
    assert tried.startswith("2 of 2 settings tried on this question are compared. ")
    assert note.startswith("Fewer than three seeds show no difference")
    assert compared.more_seeds(1, "gold") == "unknown"


@pytest.mark.parametrize("seeds", [(1, 2, 3), (4, 5, 6)])
def test_seeds_without_spread_tell_nothing(seeds: tuple[int, ...]) -> None:
    ones, twos = setting({1: 0.1, 2: 0.1, 3: 0.1}), setting(dict.fromkeys(seeds, 0.3))
    found = estimate_difference(ones, twos, "gold")
    assert found.verdict == "no spread"
    assert math.isnan(found.estimate.half)
    equal = setting(dict.fromkeys(seeds, 0.1))
    assert estimate_difference(ones, equal, "gold").verdict == "-"
    assert compare_with_first([ones, equal]).more_seeds(1, "gold") == "unknown"


def test_holm_keeps_what_is_told_among_all_tests() -> None:
    # Holm (1979): 0.01 <= 0.05 / 4 and 0.015 <= 0.05 / 3, but 0.03 > 0.05 / 2 ends the search.
    found = {(1, "a"): 0.03, (1, "b"): 0.01, (2, "a"): 0.04, (2, "b"): 0.015}
    assert keep_significant(found, 4) == {(1, "b"), (2, "b")}
    assert keep_significant(found, 5) == {(1, "b")}, "0.015 > 0.05 / 4"
    assert keep_significant(found, 6) == frozenset(), "tests that are not shown count too"


def scored(seed: int, kl_ctl: float, *, by: str) -> ComparedRun:
    meanings = {"score": by, "objective": f"held-out score, {by}"}
    return run(kl_ctl, seed, score=kl_ctl + seed, objective=kl_ctl)._replace(meanings=meanings)


def test_scores_of_different_reward_models_are_not_subtracted() -> None:
    shared = [Setting({}, [scored(s, kl, by=f"model {s}") for s in (1, 2, 3)]) for kl in (0.1, 0.2)]
    assert compare_with_first(shared).left_out == {}, "each pair shares its reward model"
    other = Setting({}, [scored(s, 0.2, by=f"model {s + 3}") for s in (1, 2, 3)])
    found = compare_with_first([shared[0], other])
    assert found.differences == {}
    assert found.left_out["score"] == "model 1; model 4"
    assert "not compared: score (model 1; model 4)" in list(note_lines([], found))
    strangers = Setting({}, [scored(s, 0.2, by=f"model {s}") for s in (7, 8, 9)])
    assert compare_with_first([shared[0], strangers]).left_out["score"] == "model 1; model 7"


def test_results_that_settings_share_are_not_shown() -> None:
    def of(kl: float, seed: int) -> ComparedRun:
        return run(kl, seed, gold=kl, objective=kl, accuracy=0.1 * seed, minutes=kl)

    settings = [Setting({}, [of(kl, seed) for seed in (1, 2)]) for kl in (0.1, 0.2)]
    found = compare_with_first(settings)
    assert found.titles == ["gold", "minutes"]
    assert list(found.differences) == [(1, "gold")]
    stored = comparison_json(settings, found)
    (difference,) = read_document("report", format_json(stored))["differences"]
    assert (difference["setting"], difference["measure"]) == (1, "gold")
    assert difference["mean"] == pytest.approx(0.1)
    assert difference["verdict"] == "two seeds"


def test_table_fits_80_columns_and_tells_settings_apart() -> None:
    pairs = product((0.05, 0.5), (0.1, 0.3))
    values = [{"ppo.kl_ctl": kl, "ppo.cliprange": clip} for kl, clip in pairs]
    draws = random.Random(1)
    settings = [
        Setting(each, [run(0.1, s, **{"exactly right": draws.random()}) for s in (1, 2, 3)])
        for each in values
    ]
    printed = io.StringIO()
    console = Console(file=printed, width=80)
    console.show(comparison_table(settings, compare_with_first(settings)))
    assert "…" not in printed.getvalue()
    assert re.search(r"exactly right +1 +0\.\d+ ± 0\.\d+", printed.getvalue())
    legend = list(legend_lines(settings))
    assert legend[2] == "   2  3 of 3 runs  ppo.kl_ctl=0.05 ppo.cliprange=0.3"


PHASES = {
    "sft": {"perplexity_before": 9.0, "perplexity_after": 1.3, "seconds": 1.0},
    "reward": {"accuracy": 0.8, "accuracy_ci": [0.7, 0.9], "seconds": 1.0},
    "ppo": {"score_before": 0.1, "score_after": 3.3, "kl_to_reference": 1.0, "seconds": 1.0},
}
PHASES["ppo"] |= {f"score_parts_{end}": {"right": 0.9} for end in ("before", "after")}
PHASES["ppo"] |= {"judge_gains": {"right": [0.0, 0.0]}}
PHASES = {name: each | {"measured": {"hours": 0.1}} for name, each in PHASES.items()}


FolderOf = Callable[..., ComparedRun]


@pytest.fixture
def folder_of(tmp_path: Path, compose: Compose) -> FolderOf:
    """Write the folder of a finished run by hand, and read it as a comparison does."""

    def make(name: str, *words: str, last: str = "ppo", weights: str = "one") -> ComparedRun:
        folder = tmp_path / name
        (folder / "reward").mkdir(parents=True)
        config = to_run_config(compose(["data.size=2000", *words]))
        write_frozen_config(config, folder)
        phases = {phase: PHASES[phase] for phase in config.phase.order}
        objective = {"sft": -1.3, "ppo": 3.3}[last]
        result = {"objective": objective, "phases": phases, "versions": {}}
        text = json.dumps(result | {"measured": {"hours": 0.1}})
        (folder / "result.json").write_text(text)
        files = {"files": {"model/model.safetensors": [9, weights], "result.json": [1, name]}}
        (folder / "reward/manifest.json").write_text(json.dumps(files))
        (found,) = find_run_folders([folder])
        return read_compared_run(found)

    return make


def test_only_what_has_one_meaning_is_compared(folder_of: FolderOf) -> None:
    first = folder_of("a")
    child = folder_of("b", "ppo.kl_ctl=0.5", f"from_run={first.folder}")
    other = folder_of("c", "ppo.kl_ctl=0.5", weights="another")
    imitated = folder_of("d", "phase=sft", last="sft")
    (ours, theirs) = group_runs_by_setting([first, child])
    starts = [first.starts[title] for title in ("score", "objective", "perplexity", "judge right")]
    assert starts == [0.1, 0.1, 9.0, 0.9]
    assert (ours.label, theirs.label) == ("ppo.kl_ctl=0.28", "ppo.kl_ctl=0.5")
    assert compare_with_first([ours, theirs]).left_out == {}
    found = compare_with_first(group_runs_by_setting([first, other]))
    assert list(found.left_out) == ["score"]
    assert re.fullmatch(r"by reward model \w{8}; by reward model \w{8}", found.left_out["score"])
    learned = "+rewards.learned={kind: model}"
    judged = [folder_of(n, learned, f"+rewards.right={{kind: stop, weight: {n}}}") for n in "01"]
    assert "judge right" in compare_with_first(group_runs_by_setting(judged)).left_out
    settings = group_runs_by_setting([first, imitated])
    assert [each.values["phase"] for each in settings] == ["ppo", "sft"]
    assert "minus the held-out perplexity" in compare_with_first(settings).left_out["objective"]
