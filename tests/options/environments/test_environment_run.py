"""Runs with an environment, as users start them."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from rlhf.gpu_check.runs import differing_files
from tests.runs import EPISODES, ROOT, TINY_RUN, finished, launch, metrics, python
from tests.soak import EVERY_STEP, progress, soak

pytestmark = pytest.mark.slow

KNOWN = {"success", "turns", "truncated", "return", "failures"}


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return finished(tmp_path_factory.mktemp("runs") / "run", *EPISODES)


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
    page = (run_dir / "report.html").read_text()
    assert "turn observed" in page


def test_the_model_plays_for_a_reader(run_dir: Path) -> None:
    words = ["-m", "rlhf.chat", run_dir, "--environment", "--seed", "3"]
    played = python(*words, popen=subprocess.Popen)  # a new interpreter: its stdin is one
    assert played.returncode == 0, played.stderr
    lines = played.stdout.splitlines()
    assert lines[0] == "user: guess 1 to 10"
    assert lines[-1].startswith("episode 3 ended: return ")


def test_evaluation_plays_episodes_and_counts_successes(run_dir: Path) -> None:
    done = python("-m", "rlhf.evaluate", run_dir, "--samples", "2", "--prompts", "6")
    assert done.returncode == 0, done.stderr
    rows = lines_of(run_dir / "evaluation" / "answers.jsonl")
    assert {row["right"] for row in rows} <= {True, False}
    assert all(row["right"] == bool(row["episode/success"]) for row in rows)
    assert len({row["prompt"] for row in rows}) == 6


def test_processes_of_their_own_change_no_number(run_dir: Path, tmp_path: Path) -> None:
    apart = finished(tmp_path / "run", *EPISODES, "environment.processes=2")
    assert metrics(apart) == metrics(run_dir)


def test_episodes_do_not_depend_on_the_number_of_ranks(run_dir: Path, tmp_path: Path) -> None:
    two = finished(tmp_path / "run", *EPISODES, "hardware.ranks_per_node=2", "zero=stage3")
    for name in ("return", "turns", "observation_tokens", "failures/malformed"):
        found = [
            [line[f"ppo/episode/{name}"] for line in metrics(run) if f"ppo/episode/{name}" in line]
            for run in (run_dir, two)
        ]
        assert found[0][0] == found[1][0], name  # the first step: the same weights
        assert len(found[0]) == len(found[1]) == 2


@pytest.mark.soak
def test_a_kill_at_a_random_moment_changes_nothing(tmp_path: Path) -> None:
    overrides = [*EPISODES, "sft.epochs=1", "ppo.steps=6"]
    whole, killed = finished(tmp_path / "whole", *overrides), tmp_path / "killed"
    said: list[str] = []
    words = [*TINY_RUN, *overrides, *EVERY_STEP, f"run_dir={killed}"]
    soak(killed, words, kills=1, lines=progress(whole), seed=2, say=said.append)
    assert len(said) == 1, said
    assert differing_files(killed, whole) == [], said


def test_an_environment_of_ones_own(tmp_path: Path) -> None:
    own = [
        "environment=custom",
        "environment.target=environments:Countdown",
        "environment.processes=2",
    ]
    words = [*TINY_RUN, *EPISODES, *own, f"run_dir={tmp_path / 'run'}"]
    refused = launch(*words, cwd=tmp_path, PYTHONPATH=ROOT / "examples")
    assert refused.returncode == 2
    assert "environment.run_code=true" in refused.stderr
    run = launch(*words, "environment.run_code=true", cwd=tmp_path, PYTHONPATH=ROOT / "examples")
    assert run.returncode == 0, run.stderr
    assert ppo_of(tmp_path / "run")["optimum"] == 1.0


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["environment=none"], "rewards with kind=environment and environment.kind=none"),
        (
            ["rollout=hybrid_engine"],
            "environment.kind=number_guessing with rollout.backend=hybrid_e",
        ),
        (["environment.max_tokens=3"], "environment.max_tokens=3: an episode is shorter than one"),
        (["environment=gymnasium"], "environment.id is missing: kind=gymnasium needs it"),
        (["data=synthetic"], "environment.kind=number_guessing with data.source=synthetic"),
        (["environment.id=x"], "environment.id=x: kind=number_guessing does not read it"),
        (["phase=pipeline_dpo"], "environment.kind=number_guessing with the dpo phase"),
        (
            ["ppo.scale_reward=running"],
            "environment.kind=number_guessing with ppo.scale_reward=running",
        ),
        (["environment.options={lows: 2}"], "environment.options={'lows': 2}"),
        (
            ["ppo.gae_unit=turn", "ppo.advantage_estimator=rloo", "ppo.responses_per_prompt=2"],
            "with ppo.gae_unit=turn and ppo.advantage_estimator=rloo: only gae has time steps",
        ),
        (["data.size=2"], "needs two or more, one of them held out"),
    ],
)
def test_what_cannot_work_is_refused_in_words(
    words: list[str], reason: str, tmp_path: Path
) -> None:
    run = launch(*TINY_RUN, *EPISODES, *words, f"run_dir={tmp_path / 'run'}", cwd=tmp_path)
    assert run.returncode == 2, run.stdout
    assert reason in run.stderr
    assert "Traceback" not in run.stderr
