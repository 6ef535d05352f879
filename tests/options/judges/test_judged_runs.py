"""Runs with a judge: a resumed and a replayed run have the same verdicts, without the judge."""

import json
from pathlib import Path
from typing import Any

import pytest

from rlhf.gpu_check.runs import metrics_without_times
from tests.options.judges.judge_server import judge_server, write_rubric
from tests.runs import KEEP_ALL, ROOT, finished, launch, python, unfinished_copy

STEPS = ["phase=pipeline_rule", "ppo.steps=4", "checkpoint.every_steps=2", *KEEP_ALL]
STEPS += ["checkpoint.digest_every=1"]


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().split("\n") if line]


@pytest.mark.slow
def test_a_judged_run_is_resumed_and_replayed_exactly_without_its_judge(tmp_path: Path) -> None:
    with judge_server() as server:
        server.faults = ["", "", *(["prose", "outside", "503", ""] * 9)]
        keys = f"rubric: {write_rubric(tmp_path)}, model: m, url: '{server.url}', retries: 0"
        rewards = f"rewards={{good: {{kind: judge, {keys}, fallback: -1}}, ends: {{kind: stop}}}}"
        run = finished(tmp_path / "run", *STEPS, rewards)
        asked = len(server.requests)
    logged = metrics_without_times(run)
    steps = [line for line in lines(run / "metrics.jsonl") if "ppo/parts/good" in line]
    assert max(step["ppo/fallback_share"] for step in steps) > 0
    assert {"ppo/parts/good.clear", "ppo/parts/good.short"} <= steps[0].keys()
    after = json.loads((run / "result.json").read_text())["phases"]["ppo"]["score_parts_after"]
    assert after.keys() == {"good", "ends", "good.clear", "good.short"}
    stored = lines(run / "verdicts.jsonl")
    assert len({line["request"] for line in stored}) == len(stored) <= asked

    verified = python("-m", "rlhf_lab.verify", run, "--seed", 1, PYTHONPATH=ROOT)
    assert verified.returncode == 0, verified.stdout + verified.stderr
    assert "differs" not in verified.stdout.replace("0 differs", "")
    assert any(line.startswith("ok") and "replay" in line for line in verified.stdout.split("\n"))

    unfinished_copy(run, tmp_path / "killed", "ppo", after_step=2)
    resumed = launch(f"resume={tmp_path / 'killed'}", cwd=tmp_path)
    assert resumed.returncode == 0, resumed.stderr
    assert metrics_without_times(tmp_path / "killed") == logged
    assert lines(tmp_path / "killed/verdicts.jsonl") == stored
