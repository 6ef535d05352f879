"""The results of papers that are exact: all answers of a small task are enumerated."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from rlhf_lab.gradients.enumerated import answer_logprobs, draw_logits, enumerate_answers


def quick_figures(load: Any, module: Any, tmp_path: Path) -> Any:
    place = load("papers.claims").Place(tmp_path, tmp_path, is_quick=True)
    return {0: module.RESULT.measure(0, place)}


def test_every_answer_is_listed_once_and_sampled_as_often_as_it_should(load: Any) -> None:
    answers = enumerate_answers()
    assert len({tuple(row) for row in answers.tokens_AT.tolist()}) == 1 + 4 + 16 + 64
    generator = torch.Generator().manual_seed(0)
    logits_PV = draw_logits(generator, answers)
    probabilities_A = answer_logprobs(logits_PV, answers).sum(dim=1).exp()
    assert float(probabilities_A.sum()) == pytest.approx(1, abs=1e-12)
    rows_N = load("papers.best_of_n").sample_answers(logits_PV, answers, 40_000, generator)
    shares_A = torch.bincount(rows_N, minlength=85) / 40_000
    assert float((shares_A - probabilities_A).abs().max()) < 0.01


def test_kl_gradients_pass_and_each_broken_identity_fails(load: Any, tmp_path: Path) -> None:
    module = load("papers.kl_gradients")
    figures = quick_figures(load, module, tmp_path)
    assert module.judge(figures).outcome == "passed"
    for name in module.IDENTITIES:
        broken = figures[0] | {name: [1e-8, 0.0]}
        verdict = module.judge({0: broken})
        assert verdict.outcome == "failed"
        assert module.IDENTITIES[name] in verdict.found
    for name in module.IDENTITIES.keys() | {"bias", "bias_0.1"}:
        assert module.judge({0: figures[0] | {name: [0.0, math.nan]}}).outcome == "failed"
    assert module.judge({0: figures[0] | {"bias": [0.5, 0.001]}}).outcome == "failed"
    assert module.judge({0: figures[0] | {"bias_0.01": figures[0]["bias_0.1"]}}).outcome == "failed"


def test_a_wrong_estimator_breaks_the_identities(
    load: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = load("papers.kl_gradients")
    right = module.estimate_kl
    monkeypatch.setattr(
        module, "estimate_kl", lambda a, b, estimator: right(b, a, estimator=estimator)
    )
    errors = quick_figures(load, module, tmp_path)[0]
    broken = {name for name in module.IDENTITIES if max(errors[name]) > module.EXACT}
    assert broken >= {"k1_reward", "k2_loss", "k3_loss", "k3_reward", "k3_token"}


def test_best_of_n_passes_and_each_broken_rule_fails(load: Any, tmp_path: Path) -> None:
    module = load("papers.best_of_n")
    figures = quick_figures(load, module, tmp_path)
    assert module.judge(figures).outcome == "passed"
    for name, value in {
        "below_bound": 0.0,
        "below_wins": -1e-3,
        "lost_by_ties": -1e-3,
        "missed": 0.1,
        "nearer": -1e-6,
        "over_kl": -1e-6,
        "sampler": 3.5,
    }.items():
        for wrong in (value, math.nan):
            verdict = module.judge({0: figures[0] | {name: [1e-4, wrong]}})
            assert verdict.outcome == "failed", name
            assert "not so:" in verdict.found


def test_the_best_of_two_coins(load: Any) -> None:
    """Two equally likely answers: the better one is chosen in 3 of 4 cases."""
    module = load("papers.best_of_n")
    coin_A = torch.tensor([0.5, 0.5], dtype=torch.float64)
    best = module.BestOf.of(coin_A, torch.tensor([1.0, 0.0]), 2)
    assert best.best_A.tolist() == [0.75, 0.25]
    assert best.kl == pytest.approx(0.75 * math.log(1.5) + 0.25 * math.log(0.5))
    assert best.win_rate == pytest.approx(0.75 * 0.75 + 0.25 * 0.25)
    same = module.BestOf.of(coin_A, torch.tensor([1.0, 1.0]), 2)
    assert (same.kl, same.win_rate) == pytest.approx((0.0, 0.5))


def test_the_estimator_of_a_best_answer_above_many_unlikely_ones(load: Any) -> None:
    """The case in which it is exact, and both ends of its range."""
    module = load("papers.best_of_n")
    policy_A = torch.cat([torch.tensor([0.3]), torch.full((100_000,), 0.7e-5)]).double()
    policy_A = policy_A / policy_A.sum()
    best = module.BestOf.of(policy_A, -torch.arange(len(policy_A)), 4)
    assert module.estimate_kl_of_best(0.3, 4) == pytest.approx(best.kl, abs=1e-4)
    assert module.estimate_kl_of_best(0.3, 4) < module.kl_bound(4) - 0.03
    assert module.estimate_kl_of_best(0.0, 4) == pytest.approx(module.kl_bound(4))
    assert module.estimate_kl_of_best(1e-12, 4) == pytest.approx(module.kl_bound(4), abs=1e-9)
    assert module.estimate_kl_of_best(1.0, 4) == 0.0
    assert module.estimate_kl_of_best(0.3, 1) == pytest.approx(0.0)


def test_the_first_of_equal_scores_is_chosen_among_the_first_n(load: Any) -> None:
    choose_best = load("papers.best_of_n").choose_best
    scores = [1.0, 3.0, 3.0, 9.0]
    assert [choose_best(scores, n) for n in (1, 2, 3, 4)] == [0, 1, 1, 3]


def test_each_broken_part_of_which_gradient_is_right_fails(load: Any) -> None:
    """From the figures that are published."""
    names = ("gradients", "gradients_of_kl", "gradients_page")
    first, module, page = (load(f"papers.{name}") for name in names)
    figures = page.read_figures(page.FIGURES)
    assert page.gradients_page(figures) == page.PAGE.read_text()
    verdict = first.judge(figures)
    assert verdict.found.endswith("; k3, loss is unbiased; k3_ratio, loss is unbiased")
    assert module.RESULT.judge(figures).outcome == "passed"
    peer = "TRL: GRPO, with k3 times the ratio in the loss, mean over tokens"
    for name, place, value, words in (
        ("RLOO", 0, 1e-9, "RLOO is biased"),
        ("RLOO", 0, math.nan, "RLOO is biased"),
        ("GRPO", 0, 0.001, "GRPO is unbiased"),
        ("k3, loss", 1, 0.001, "k3, loss is unbiased"),
        ("RLOO", first.COLUMNS.index("deviation"), -5.0, "means do not have their expectation"),
        (peer, 2, 1e-5, "differs by 1e-05"),
    ):
        row = list(figures[1][name])
        row[place] = value
        verdict = module.RESULT.judge({**figures, 1: {**figures[1], name: row}})
        assert verdict.outcome == "failed", name
        assert words in verdict.found
    broken = {**figures, 1: {**figures[1], first.EQUAL: 1e-9}}
    assert f"not so: {first.EQUAL}" in module.RESULT.judge(broken).found
