"""The result about sentiment: its verdicts, the answers that it keeps, and what it refuses."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def sentiment(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module("papers.sentiment")


def figures(low: float, *, pairs_after: float = 0.9) -> dict[str, Any]:
    return {
        "gain by AFINN, interval": [low, low + 0.2],
        "distinct pairs of words, before": 0.9,
        "distinct pairs of words, after": pairs_after,
    }


@pytest.mark.parametrize(
    ("lows", "pairs_after", "outcome"),
    [
        ([0.1, 0.2, 0.01], 0.9, "passed"),
        ([0.1, 0.2, -0.01], 0.9, "cannot be told"),
        ([0.1, 0.2], 0.9, "cannot be told"),
        ([0.1, -0.3, -0.01], 0.9, "failed"),
        ([0.1, 0.2, 0.01], 0.7, "failed"),
    ],
)
def test_each_seed_must_gain_and_keep_its_words(
    lows: list[float], pairs_after: float, outcome: str, sentiment: ModuleType
) -> None:
    found = {seed: figures(low, pairs_after=pairs_after) for seed, low in enumerate(lows, 1)}
    assert sentiment.judge(found).outcome == outcome


def test_answers_stand_side_by_side_as_they_are(sentiment: ModuleType) -> None:
    rows = [
        {"model": model, "prompt": f"The hike {n}", "response": f" was | {model}.\n"}
        for model in ("start", "ppo")
        for n in range(30)
    ]
    lines = sentiment.printed(rows).splitlines()
    assert lines[0] == "| beginning | before | after |"
    assert lines[2] == "| The hike 0 | was \\| start. | was \\| ppo. |"
    assert len(lines) == 2 + 20


def test_without_a_model_nothing_is_measured(
    sentiment: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("RLHF_SMOLLM2", str(tmp_path))
    with pytest.raises(
        RuntimeError, match=r"holds no model\. The row needs .*SmolLM2-135M-Instruct"
    ):
        sentiment.model_folder()
