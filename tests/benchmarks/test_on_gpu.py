"""on_gpu.py: what it runs, what it cannot run, and what it says of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.runs import ROOT

SCRIPT = ROOT / "benchmarks" / "on_gpu.py"


@pytest.fixture
def script(load: Any) -> Any:
    return load("on_gpu")


def test_a_call_continues_what_an_earlier_one_began(
    script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(name: str, code: str, skipped: str = "") -> object:
        return script.Run("part", name, [sys.executable, "-c", code], skipped=skipped)

    begun = tmp_path / "begun"
    wait = f"import time, pathlib; f = pathlib.Path({str(begun)!r}); t = f.exists(); f.touch()\n"
    wait += "time.sleep(0 if t else 60)"
    runs = [run("quick", "print(1)"), run("slow", wait), run("none", "", "there is one GPU")]
    monkeypatch.setattr(script, "list_runs", lambda *_: runs)

    def call(minutes: float) -> tuple[int, dict[str, dict[str, object]]]:
        monkeypatch.setattr(sys, "argv", ["on_gpu.py", str(tmp_path), "--minutes", str(minutes)])
        code = script.main()
        return code, json.loads((tmp_path / "on_gpu.json").read_text())

    code, rows = call(0.02)
    assert code == script.UNFINISHED
    assert rows["part: quick"]["code"] == 0
    assert rows["part: slow"]["code"] == script.KILLED
    assert rows["part: none"] == {"skipped": "there is one GPU"}
    code, again = call(1)
    assert code == 0
    assert again["part: quick"] == rows["part: quick"], "it did not run again"
    assert again["part: slow"]["code"] == 0
    runs.append(run("wrong", "1 / 0"))
    assert call(1)[0] == 1
    assert "ZeroDivisionError" in (tmp_path / "logs" / "part_wrong.log").read_text()


def test_the_figures_of_a_run(script: Any, tmp_path: Path) -> None:
    lines = [{"phase": "sft", "step": 1, "sft/loss": 2.0}]
    for step, seconds in enumerate((9.0, 2.0, 4.0), start=1):
        line = {"phase": "ppo", "step": step, "ppo/actor_loss": step / 8}
        lines.append(line | {f"time/{part}_seconds": seconds for part in script.SECONDS})
    (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    plan = {"phases": {"ppo": {"step_seconds": {"generate": 1.0, "train": 2.0}}}}
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    (tmp_path / "result.json").write_text('{"objective": 0.5}')
    figures = script.read_figures(tmp_path)
    assert figures["step s"] == 3.0, "the median without the first step"
    assert figures["planned step s"] == 3.0
    assert figures["ppo/actor_loss"] == 0.125, "of the first step, before the runs part"
    assert (figures["sft/loss"], figures["objective"]) == (2.0, 0.5)


@pytest.mark.soak
@pytest.mark.parametrize("machine", ["a100", "2xa100"])
def test_all_parts_end_well_on_an_emulated_gpu(machine: str, tmp_path: Path) -> None:
    words = ["-m", "tests.pretend_cuda", "--machine", machine, str(SCRIPT), str(tmp_path / "out")]
    run = subprocess.run(
        [sys.executable, *words, "--size", "tiny", "--minutes", "30"],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout
    assert ("there is one GPU" in run.stdout) == (machine == "a100")
