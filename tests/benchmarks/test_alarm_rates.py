"""Error rates of alarms and comparisons: what is counted as right, wrong and too late."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
from omegaconf import DictConfig

from rlhf.config.freeze import to_run_config, write_frozen_config

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def rates(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module("alarm_rates")


def run_with(folder: Path, gold: list[float]) -> Path:
    """Write a run whose score rises at every evaluation; the last line is torn."""
    folder.mkdir(parents=True)
    lines = [
        {"phase": "ppo", "step": 2 * n, "ppo/eval_gold": value, "ppo/eval_score": 0.1 * n}
        for n, value in enumerate(gold)
    ]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (folder / "metrics.jsonl").write_text(text + '{"phase": "p')
    return folder


def test_lead_time_counts_from_the_alarm_to_the_fall(rates: ModuleType, tmp_path: Path) -> None:
    found = rates.outcome(run_with(tmp_path / "run", [0.6, 0.6, 0.6, 0.57, 0.55, 0.545, 0.5]))
    assert [(alarm.name, alarm.step) for alarm in found.alarms] == [("score_against_gold", 10)]
    assert found.fell_at == 12
    row = rates.scenario_row("over-optimised", [found, found])
    assert row[1:6] == ["2", "2 of 2", None, "10", "2 (2 to 2)"]
    assert rates.scenario_row("default", [found])[3] == "1 of 1", "a false alarm"
    assert rates.scenario_row("weak penalty", [found])[2:6] == [None] * 4, "neither"


def test_an_alarm_is_counted_where_it_is_right_and_where_it_is_wrong(
    rates: ModuleType, tmp_path: Path
) -> None:
    raised = rates.outcome(run_with(tmp_path / "a", [0.6, 0.6, 0.6, 0.5, 0.4]))
    silent = rates.outcome(run_with(tmp_path / "b", [0.6, 0.6, 0.6, 0.6, 0.6]))
    found = {"over-optimised": [raised, silent], "default": [silent, silent, raised]}
    row = rates.alarm_row(rates.AlarmName.score_against_gold, found)
    assert row == ["`score_against_gold`", "1 of 2", "1 of 3"]
    assert rates.alarm_row(rates.AlarmName.no_change, found)[1] is None


def test_comparison_tells_settings_apart_only_if_they_differ(
    rates: ModuleType,
    tmp_path: Path,
    compose: Callable[[list[str]], DictConfig],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    comparison = importlib.import_module("comparison_rates")
    for name, seeds, kl in (
        ("default", 6, 1.0),
        ("weak_penalty", 3, 3.0),
        ("strong_penalty", 3, 0.5),
    ):
        for seed in range(1, seeds + 1):
            run_dir = tmp_path / name / str(seed)
            run_dir.mkdir(parents=True)
            write_frozen_config(to_run_config(compose([f"seed={seed}"])), run_dir)
            ppo = {"kl_to_reference": kl * (1 + 0.01 * (seed % 3)), "score_after": 0.1 * (seed % 3)}
            measured = {"hours": 0.1}
            ppo |= {"exact_after": 0.5, "gold_after": 0.5, "score_before": 0.0}
            ppo |= {"seconds": 360.0, "measured": measured}
            result = {"objective": 0.5, "phases": {"ppo": ppo}, "measured": measured}
            result["versions"] = {}
            (run_dir / "result.json").write_text(json.dumps(result))
    monkeypatch.setattr("sys.argv", ["comparison_rates.py", str(tmp_path), "--pairs", "4"])
    comparison.main()
    rows = [line.split("|")[1:4] for line in capsys.readouterr().out.splitlines()[2:]]
    told = {title.strip(): (same.strip(), other.strip()) for title, same, other in rows}
    assert told["KL, nats"][1] == "4 of 4"
    assert told["objective"] == ("0 of 4", "0 of 4")
