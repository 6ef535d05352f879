"""What the results of papers compute from their measurements."""

from __future__ import annotations

import importlib
import itertools
import json
import math
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from rlhf.data.synthetic import prompt_of_request

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A module of benchmarks/papers, which import one another from that folder's parent."""
    monkeypatch.syspath_prepend(BENCHMARKS)

    def module(name: str) -> ModuleType:
        return importlib.import_module(f"papers.{name}")

    return module


def outcomes(module: ModuleType, *seeds: dict[str, Any]) -> str:
    """The outcome of these figures, one dictionary for each seed."""
    return str(module.RESULT.judge(dict(enumerate(seeds, start=1))).outcome)


def test_every_result_states_what_could_fail(load: Any) -> None:
    results = load("__main__").all_results()
    assert len(results) >= 6
    for name, result in results.items():
        assert "passed:" in result.criterion.lower(), name
        assert "failed:" in result.criterion.lower(), name
        assert "https://" in result.source or "benchmarks/losses.md" in result.source, name


def test_a_run_that_broke_is_refused_though_it_has_a_report(
    load: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def break_off(runs: Mapping[Path, object], **_: object) -> None:
        for run_dir in runs:
            run_dir.mkdir(parents=True)
            (run_dir / "report.html").touch()

    started = load("started_runs")
    monkeypatch.setattr(started, "run_on_cores", break_off)
    with pytest.raises(RuntimeError, match=r"launch.py ppo.steps=1 seed=3 .*: did not finish"):
        started.run_of(started.Place(tmp_path, tmp_path, is_quick=False), "ppo.steps=1", seed=3)


def test_best_of_n_is_the_mean_over_all_choices(load: Any) -> None:
    score_PN = torch.tensor([[0.3, 2.0, -1.0, 0.5], [4.0, 1.0, 2.0, 3.0]], dtype=torch.float64)
    gold_PN = torch.tensor([[1.0, 0.2, 0.4, 0.9], [0.1, 0.7, 0.6, 0.3]], dtype=torch.float64)
    for n in (1, 2, 3, 4):
        best = [
            gold[max(chosen, key=lambda i, row=score: row[i])]
            for score, gold in zip(score_PN.tolist(), gold_PN.tolist(), strict=True)
            for chosen in itertools.combinations(range(4), n)
        ]
        found = load("best_of_many").gold_of_best(score_PN, gold_PN, n)
        assert found == pytest.approx(sum(best) / len(best), abs=1e-12)


@pytest.mark.parametrize(("own", "other"), [("RL", "best-of-n"), ("best-of-n", "RL")])
def test_a_law_is_told_from_the_other(load: Any, own: str, other: str) -> None:
    laws = load("overoptimisation_laws")
    distances = [0.4, 0.9, 1.5, 2.5, 4.0]
    gains = [d * (0.5 - 0.2 * laws.FORMS[own](d)) for d in distances]
    right, wrong = (laws.fitted(distances, gains, form) for form in (own, other))
    assert right["alpha"] == pytest.approx(0.5)
    assert right["beta"] == pytest.approx(0.2)
    assert right["residual"] < 1e-20 < wrong["residual"]


def test_gold_is_read_between_evaluations(load: Any) -> None:
    frontier = load("penalty_frontier")
    points = ((0.0, 0.5), (1.0, 0.7), (3.0, 0.3))
    curve = [frontier.Evaluated(kl, score=0.0, gold=gold) for kl, gold in points]
    assert frontier.gold_at(curve, 0.5) == pytest.approx(0.6)
    assert frontier.gold_at(curve, 2.0) == pytest.approx(0.5)
    assert frontier.gold_at(curve, 3.5) is None


def test_verdicts_follow_the_criteria(load: Any) -> None:
    staleness = load("staleness_limit")

    def lags(one: float, eight: float, noise: float) -> dict[str, float]:
        return {"gold, lag 0": 0.9, "gold, lag 1": 0.9 + one + noise, "gold, lag 8": 0.9 + eight}

    few = (-0.005, 0.0, 0.005)
    assert outcomes(staleness, *(lags(0.0, -0.2, n) for n in few)) == "passed"
    assert outcomes(staleness, *(lags(-0.1, -0.2, n) for n in few)) == "failed"
    assert outcomes(staleness, *(lags(0.0, 0.0, n) for n in few)) == "failed", "lag 8 costs nothing"
    assert outcomes(staleness, *(lags(0.0, -0.2, 20 * n) for n in few)) == "cannot be told"

    ensembles = load("pessimistic_ensembles")
    golds = {"single": 0.3, "worst": 0.5, "uncertainty": 0.5, "mean": 0.4}
    seed = {f"gold after, {arm}": gold for arm, gold in golds.items()}
    assert outcomes(ensembles, seed, seed) == "passed"
    assert (
        outcomes(ensembles, seed | {"gold after, worst": 0.1}, seed | {"gold after, worst": 0.1})
        == "failed"
    )
    assert outcomes(ensembles, seed, seed | {"gold after, worst": 0.1}) == "cannot be told"


def test_speed_is_compared_after_the_first_steps(load: Any) -> None:
    speed = load("reward_speed")

    def seed(early: float, after: float) -> dict[str, float]:
        flat = {"gold early, accurate_flat": 0.7, "gold after, accurate_flat": 0.8}
        return {"gold early, noisy": 0.7 + early, "gold after, noisy": 0.8 + after, **flat}

    assert outcomes(speed, *[seed(0.05, -0.05)] * 3) == "passed"
    assert outcomes(speed, *[seed(-0.01, 0.05)] * 3) == "failed"
    assert outcomes(speed, seed(0.2, 0.0), seed(-0.1, 0.0)) == "cannot be told"


@pytest.mark.parametrize(
    ("module", "peer"), [("learning_curves", "TRL"), ("ppo_curves", "AgileRL")]
)
def test_curves_beside_a_peer_pass_within_the_margin(load: Any, module: str, peer: str) -> None:
    curves = load(module)

    def pair(ours: float, again: float) -> dict[str, object]:
        found: dict[str, object] = {}
        for name, gold in {"ours": ours, peer: 0.8, f"{peer} again": again}.items():
            curve = [gold + 0.001 * (step % 3) for step in range(28)]
            found |= {f"gold, {name}": curve, f"gold of the last steps, {name}": gold}
        return found

    alike = (pair(0.81, 0.8), pair(0.79, 0.8))
    assert outcomes(curves, *alike) == "cannot be told", "two seeds tell little"
    assert outcomes(curves, *alike, *alike) == "passed"
    assert outcomes(curves, pair(0.7, 0.8), pair(0.71, 0.8)) == "cannot be told"
    assert outcomes(curves, *[pair(0.7, 0.8)] * 3) == "failed"
    found = dict(enumerate((pair(0.7, 0.8), pair(0.8, 0.9), pair(0.7, 0.8))))
    assert [curves.PEER.apart(found, name) for name in ("ours", f"{peer} again")] == [2, 1]


def test_agilerl_rewards_the_last_token_of_a_response_alone(load: Any) -> None:
    ids = [torch.tensor([[5, 6, 7, 8, 9]]), torch.tensor([[5, 6, 7]])]  # prompts of 2 and 1 tokens
    keep = [torch.tensor([[False, True, True, True]]), torch.tensor([[True, True]])]
    experiences, turns_BT = load("peer_ppo").as_turns(ids, keep, [0.5, 0.25])
    assert turns_BT.tolist() == [[-1, 0, 1, 2], [0, 1, -1, -1]]
    assert experiences[2].tolist() == [[0, 0, 0.5], [0, 0.25, 0]]


def test_a_flat_reward_orders_as_the_judge_does(load: Any) -> None:
    rewards = load("constructed_rewards")
    asked = prompt_of_request("Repeat this: kiwi lamp.")
    given = [" Sure! kiwi lamp.", " kiwi lamp. I like rain.", " kiwi.", " Ugh. lamp."]
    accurate = rewards.accurate([asked] * 4, given)
    flat = rewards.accurate_flat([asked] * 4, given)
    order = sorted(range(4), key=accurate.__getitem__)
    assert order == sorted(range(4), key=flat.__getitem__)
    spread, small = (max(each) - min(each) for each in (accurate, flat))
    assert small == pytest.approx(rewards.FLATNESS * spread)
    assert rewards.noisy([asked], given[:1]) == rewards.noisy([asked], given[:1])
    assert math.isfinite(rewards.noisy([asked], given[:1])[0])


def test_a_critic_barely_ranks_if_the_interval_lies_near_chance(load: Any) -> None:
    module = load("critic_ranking")
    assert (
        outcomes(module, {"pairs": 300.0, "right": 155.0}, {"pairs": 300.0, "right": 160.0})
        == "passed"
    )
    assert outcomes(module, {"pairs": 300.0, "right": 210.0}) == "failed"
    assert outcomes(module, {"pairs": 40.0, "right": 23.0}) == "cannot be told"
    assert outcomes(module, {"pairs": 0.0, "right": 0}) == "cannot be told"


def test_only_late_states_in_the_middle_of_responses_are_ranked(load: Any, tmp_path: Path) -> None:
    module = load("critic_ranking")
    rows = [
        {"step": step, "pair": step, "place": place, "value": 0.0, "true_value": 0.0, "error": 0.0}
        for step in (8, 16, 24)
        for place in (0.1, 0.2, 0.7, 0.8)
    ]
    (tmp_path / "critic.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    states = module.states_in(tmp_path, low=0.2, high=0.8)
    assert [(state.pair, state.place) for state in states] == [
        (step, place) for step in (16, 24) for place in (0.2, 0.7)
    ]
