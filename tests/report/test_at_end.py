"""The end of a run: the summary, then the page, also of a run that has diverged."""

from __future__ import annotations

import json
import math
from html import unescape
from pathlib import Path
from typing import Any

import pytest
import yaml

from rlhf.config.freeze import to_run_config, write_frozen_config
from rlhf.report import at_end, run_page, summary
from rlhf.report.next_commands import suggest_commands
from tests.conftest import Compose
from tests.report.test_summary import RESULT as SHOWN

ALARM = {"phase": "ppo", "step": 1, "name": "not_finite", "metric": "ppo/actor_loss"}
OWN = {"measured": {"hours": 1.0}}
RESULT = SHOWN | {"phases": {name: each | OWN for name, each in SHOWN["phases"].items()}}
KEYS = ["ppo.kl_ctl=0.3", "ppo.actor_lr=0.01", "reward.epochs=1", "sft.lr=0.1", "hardware=cpu"]


@pytest.fixture
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compose: Compose) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "run"
    (path / "ppo/actor").mkdir(parents=True)
    config = to_run_config(compose(KEYS))
    assert config.alarms.stop == ["not_finite"]
    write_frozen_config(config, path)
    (path / "result.json").write_text(json.dumps(RESULT))
    return path


def end(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> str:
    with at_end.report_on_exit(run_dir):
        pass
    printed = capsys.readouterr()
    return printed.out + printed.err


def diverge(run_dir: Path, phase: str = "ppo") -> None:
    line = ALARM | {"phase": phase, "value": None, "advice": "Lower it."}
    (run_dir / "alarms.jsonl").write_text(json.dumps(line) + "\n")


@pytest.mark.parametrize(
    ("module", "broken", "warns", "stays"),
    [
        (summary, "print_summary", "the summary of", "report: run/report.html"),
        (run_page, "write_report", "the report of", "What to type next"),
    ],
)
def test_neither_summary_nor_page_takes_the_other_along(
    run_dir: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    *,
    module: Any,
    broken: str,
    warns: str,
    stays: str,
) -> None:
    def fails(*_: object) -> None:
        raise OSError(28, "No space left on device")

    assert "warning" not in end(run_dir, capsys)
    monkeypatch.setattr(module, broken, fails)
    printed = end(run_dir, capsys)
    assert f"warning: {warns}" in printed
    assert stays in printed


def test_the_last_screen_begins_with_the_verdict_of_the_page(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    details, _, last_screen = end(run_dir, capsys).rpartition("Files of this run")
    (verdict,) = (line for line in last_screen.splitlines() if line.endswith(" to doubt it"))
    assert f">{verdict}</p>" in unescape((run_dir / "report.html").read_text())
    assert verdict not in details


def test_a_diverged_run_says_since_when(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ppo = RESULT["phases"]["ppo"] | {"kl_to_reference": None, "gold_gain_ci": [None, None]}
    result = RESULT | {"phases": RESULT["phases"] | {"ppo": ppo}}
    (run_dir / "result.json").write_text(json.dumps(result))
    assert "not finite" in end(run_dir, capsys)
    diverge(run_dir)
    printed = end(run_dir, capsys)
    assert "NaN since PPO step 1 (ppo/actor_loss)" in printed
    assert "warning" not in printed
    assert "NaN since PPO step 1" in (run_dir / "report.html").read_text()


def test_a_run_that_its_alarm_stopped_has_a_summary(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (run_dir / "result.json").unlink()
    assert "What to type next" not in end(run_dir, capsys), "it was interrupted"
    (run_dir / "sft").mkdir()
    (run_dir / "sft/result.json").write_text(json.dumps(RESULT["phases"]["sft"]))
    diverge(run_dir)
    printed = end(run_dir, capsys)
    assert "NaN since PPO step 1" in printed
    assert "4.312" in printed, "the finished phase has its rows"
    assert "ppo.actor_lr=0.001" in printed


@pytest.mark.parametrize(
    ("phase", "interval", "change"),
    [
        ("ppo", [0.6, 0.7], "ppo.actor_lr=0.001"),
        ("sft", [0.6, 0.7], "sft.lr=0.01"),
        (None, [0.4, 0.6], "reward.epochs=2"),
        (None, [0.6, 0.7], "ppo.kl_ctl=0.6"),
    ],
)
def test_the_first_fault_decides_what_to_type_next(
    run_dir: Path, phase: str | None, interval: list[float], change: str
) -> None:
    if phase is not None:
        diverge(run_dir, phase)
    (run_dir / "reward").mkdir()
    (run_dir / "reward/result.json").write_text(
        json.dumps({"accuracy": 0.6, "accuracy_ci": interval})
    )
    assert f"  rlhf {change}" in suggest_commands(run_dir)


def test_what_to_type_next_does_not_change_what_a_source_run_determines(run_dir: Path) -> None:
    config = yaml.safe_load((run_dir / "config.yaml").read_text())
    (run_dir / "config.yaml").write_text(yaml.safe_dump(config | {"from_run": "runs/a/b"}))
    (run_dir / "reward").mkdir()
    (run_dir / "reward/result.json").write_text(json.dumps({"accuracy_ci": [0.4, 0.6]}))
    said = "\n".join(suggest_commands(run_dir))
    assert "reward.epochs" not in said
    assert "ppo.kl_ctl=0.6" in said, "the next suggestion"


def test_null_stays_unknown_only_in_a_plan() -> None:
    from rlhf.base.finite_numbers import restore_nan

    found = restore_nan({"a_ci": [None, 1.0], "planned": {"hours": None}, "b": {"c": None}})
    assert math.isnan(found["a_ci"][0])
    assert math.isnan(found["b"]["c"])
    assert found["planned"] == {"hours": None}
