"""The results of papers that are exact: all answers of a small task are enumerated."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Import a module of ``benchmarks/papers`` as ``python -m papers`` does."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    return lambda name: importlib.import_module(f"papers.{name}")


def quick_figures(load: Any, module: Any, tmp_path: Path) -> Any:
    place = load("claims").Place(tmp_path, tmp_path, is_quick=True)
    return {0: module.RESULT.measure(0, place)}


def test_every_answer_is_listed_once_and_sampled_as_often_as_it_should(load: Any) -> None:
    enumerated = load("enumerated")
    answers = enumerated.enumerate_answers()
    assert len({tuple(row) for row in answers.tokens_AT.tolist()}) == 1 + 4 + 16 + 64
    generator = torch.Generator().manual_seed(0)
    logits_PV = enumerated.draw_logits(generator)
    probabilities_A = enumerated.token_logprobs(logits_PV, answers).sum(dim=1).exp()
    assert float(probabilities_A.sum()) == pytest.approx(1, abs=1e-12)
    rows_N = enumerated.sample_answers(logits_PV, answers, 40_000, generator)
    shares_A = torch.bincount(rows_N, minlength=85) / 40_000
    assert float((shares_A - probabilities_A).abs().max()) < 0.01


def test_kl_gradients_pass_and_each_broken_identity_fails(load: Any, tmp_path: Path) -> None:
    module = load("kl_gradients")
    figures = quick_figures(load, module, tmp_path)
    assert module.judge(figures).outcome == "passed"
    for name in module.IDENTITIES:
        broken = figures[0] | {name: [1e-8, 0.0]}
        verdict = module.judge({0: broken})
        assert verdict.outcome == "failed"
        assert module.IDENTITIES[name] in verdict.found
    assert module.judge({0: figures[0] | {"bias": [0.5, 0.001]}}).outcome == "failed"
    assert module.judge({0: figures[0] | {"bias_0.01": figures[0]["bias_0.1"]}}).outcome == "failed"


def test_a_wrong_estimator_breaks_the_identities(
    load: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = load("kl_gradients")
    right = module.estimate_kl
    monkeypatch.setattr(
        module, "estimate_kl", lambda a, b, estimator: right(b, a, estimator=estimator)
    )
    errors = quick_figures(load, module, tmp_path)[0]
    broken = {name for name in module.IDENTITIES if max(errors[name]) > module.EXACT}
    assert broken >= {"k1_reward", "k2_loss", "k3_loss", "k3_reward", "k3_token"}
