"""Runs with an environment, as users start them."""

import json
from pathlib import Path
from typing import Any

import pytest

from rlhf.chat.__main__ import main as chat
from rlhf.evaluate.__main__ import main as evaluate
from rlhf.gpu_check.runs import differing_files
from tests.runs import (
    EPISODES,
    KEEP_ALL,
    ROOT,
    finished,
    launch,
    metrics,
    unfinished_copy,
)

pytestmark = pytest.mark.slow

KNOWN = {"success", "turns", "truncated", "return", "failures"}


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    words = [*EPISODES, "ppo.gae_unit=turn", "checkpoint.every_steps=1", *KEEP_ALL]
    return finished(tmp_path_factory.mktemp("runs") / "run", *words)


def test_continued_episodes_equal_those_that_never_were_stopped(
    run_dir: Path, tmp_path: Path
) -> None:
    stopped = tmp_path / "stopped"
    unfinished_copy(run_dir, stopped, "ppo", after_step=1)
    run = launch(f"resume={stopped}", cwd=tmp_path)
    assert run.returncode == 0, run.stderr
    assert "ppo: continues after step 1" in run.stdout
    assert differing_files(stopped, run_dir) == []


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def ppo_of(run_dir: Path) -> dict[str, Any]:
    result: dict[str, Any] = json.loads((run_dir / "result.json").read_text())
    return result["phases"]["ppo"]


def test_result_says_what_episodes_came_to(run_dir: Path) -> None:
    ppo = ppo_of(run_dir)
    for name in KNOWN:
        assert {f"{name}_before", f"{name}_after"} <= ppo.keys(), name
    assert ppo["optimum"] == 1.0
    assert 0.1 < ppo["random_return"] < 0.7
    assert ppo["score_after"] == ppo["return_after"]
    assert 1 <= ppo["turns_after"] <= 4
    last = [line for line in metrics(run_dir) if "ppo/episode/turns" in line][-1]
    assert last["ppo/episode/observation_tokens"] > 0
    assert last["ppo/episode/failures/timeout"] == 0


def test_samples_show_turns_apart(run_dir: Path) -> None:
    samples = lines_of(run_dir / "samples.jsonl")
    assert len({sample["prompt"] for sample in samples if sample["step"] == 0}) == 8, "all differ"
    for sample in samples:
        roles = [turn["role"] for turn in sample["turns"]]
        assert roles[::2] == ["assistant"] * len(roles[::2])
        assert set(roles[1::2]) <= {"user"}
        assert len(roles) % 2 == 1
    assert any("[user: " in sample["response"] for sample in samples)
    assert "turn observed" in (run_dir / "report.html").read_text()


def test_the_model_plays_and_its_successes_are_counted(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert chat([str(run_dir), "--environment", "--seed", "3"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "user: guess 1 to 10"
    assert lines[-1].startswith("episode 3 ended: return ")
    assert evaluate([str(run_dir), "--samples", "2", "--prompts", "6"]) == 0
    rows = lines_of(run_dir / "evaluation" / "answers.jsonl")
    assert {row["right"] for row in rows} <= {True, False}
    assert all(row["right"] == bool(row["episode/success"]) for row in rows)
    assert len({row["prompt"] for row in rows}) == 6


def test_episodes_do_not_depend_on_the_number_of_ranks(run_dir: Path, tmp_path: Path) -> None:
    apart = ["hardware.ranks_per_node=2", "zero=stage3", f"from_run={run_dir}", "ppo.steps=1"]
    two = finished(tmp_path / "run", *EPISODES, *apart)
    for name in ("return", "turns", "observation_tokens", "failures/malformed"):
        found = [
            [line[f"ppo/episode/{name}"] for line in metrics(run) if f"ppo/episode/{name}" in line]
            for run in (run_dir, two)
        ]
        assert found[0][0] == found[1][0], name  # the first step: the same weights


def test_an_environment_of_ones_own(run_dir: Path, tmp_path: Path) -> None:
    own = ["environment=custom", "environment.target=environments:Countdown", "ppo.steps=1"]
    own += ["environment.processes=2", "environment.run_code=true"]
    own += ["phase=ppo", "model=pretrained", f"model.path={run_dir / 'sft' / 'model'}"]
    how = [word for word in EPISODES if not word.startswith("phase=")]
    found = finished(tmp_path / "run", *how, *own, PYTHONPATH=ROOT / "examples")
    assert ppo_of(found)["optimum"] == 1.0
