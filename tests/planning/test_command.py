"""``plan=only`` and ``plan=check`` as users type them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.runs import launch

ROOT = Path(__file__).parents[2]
PROFILES = sorted(path.stem for path in (ROOT / "conf" / "hardware").glob("*.yaml"))


@pytest.mark.slow
@pytest.mark.parametrize("hardware", PROFILES)
def test_every_profile_answers(hardware: str, tmp_path: Path) -> None:
    run = launch("plan=only", "model=opt_13b", f"hardware={hardware}", cwd=tmp_path)
    assert run.returncode == 0, run.stderr
    assert "fit" in run.stdout
    plan = json.loads((tmp_path / "runs" / "latest" / "plan.json").read_text())
    assert plan["fits"] == ("does not fit" not in run.stdout)
    assert set(plan["phases"]) == {"sft", "reward", "ppo"}
    assert {"weights", "process"} < set(plan["phases"]["ppo"]["memory"])
    assert not (tmp_path / "runs" / "latest" / "metrics.jsonl").exists()


@pytest.mark.slow
def test_what_cannot_fit_is_refused_before_anything_is_made(tmp_path: Path) -> None:
    command = ("model=opt_13b", "model@reward_model=opt_350m", "hardware=a100_80g", "zero=stage1")
    run = launch(*command, cwd=tmp_path)
    assert run.returncode == 2
    assert run.stderr.startswith("error: sft needs ")
    assert "zero=auto" in run.stderr
    assert "lora=all" in run.stderr
    assert "Traceback" not in run.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_sweep_prints_a_line_for_each(tmp_path: Path) -> None:
    run = launch("-m", "plan=only", "model=opt_1.3b", "hardware=a100_40g,a100_80g", cwd=tmp_path)
    assert run.returncode == 0, run.stderr
    lines = [line for line in run.stdout.splitlines() if line.startswith("model=opt_1.3b ")]
    assert [line.split(":")[0].split()[-1] for line in lines] == [
        "hardware=a100_40g",
        "hardware=a100_80g",
    ]
    assert all("$" in line for line in lines)
