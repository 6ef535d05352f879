"""How far, how fast and whether alive: from files alone."""

from __future__ import annotations

import os
import re
import socket
import time
from pathlib import Path

import pytest

from rlhf.watch.live_run import LiveRun
from rlhf.watch.progress import RunProgress, age_text
from tests.watch.watched import append, finish, ppo_lines, sft_lines, started_run


def written(folder: Path, *, seconds_ago: float) -> None:
    at = time.time() - seconds_ago
    os.utime(folder / "metrics.jsonl", (at, at))


def test_time_left_is_measured_for_this_phase_and_planned_for_the_next(tmp_path: Path) -> None:
    run = LiveRun(started_run(tmp_path / "run"))
    run.poll()
    assert run.progress.hours_left() == pytest.approx(0.5), "as planned"
    append(run.folder / "metrics.jsonl", sft_lines(range(1, 3)))
    written(run.folder, seconds_ago=100)
    run.poll()
    assert run.progress.pace is None, "one time tells no pace"
    assert run.progress.hours_left() == pytest.approx(0.1 * 8 / 10 + 0.4)
    append(run.folder / "metrics.jsonl", sft_lines(range(3, 6)))
    written(run.folder, seconds_ago=40)
    run.poll()
    assert run.progress.pace == pytest.approx(20, abs=0.1)
    assert run.progress.hours_left() == pytest.approx(5 * 20 / 3600 + 0.4, abs=1e-3)
    (run.folder / "sft").mkdir()
    (run.folder / "sft" / "result.json").write_text('{"measured": {"hours": 0.2}}')
    append(run.folder / "metrics.jsonl", ppo_lines([8]))
    run.poll()
    assert run.progress.pace is None, "the pace of another phase"
    done, running = run.progress.phases()
    assert (done.state, done.taken, done.left, done.planned) == ("done", 0.2, 0.0, 0.1)
    assert done.pace == pytest.approx(0.2 * 3600 / 5)
    assert (running.state, running.step, running.steps) == ("running", 8, 40)
    assert running.planned_pace == pytest.approx(36)


def test_a_resumed_run_counts_from_where_it_was_cut(tmp_path: Path) -> None:
    run = LiveRun(started_run(tmp_path / "run"))
    path = run.folder / "metrics.jsonl"
    append(path, ppo_lines(range(1, 31)))
    run.poll()
    path.write_text("")
    append(path, ppo_lines(range(1, 21)))
    run.poll()
    assert run.progress.step_text == "ppo 20 of 40"
    assert run.progress.pace is None
    assert run.curves["ppo/score_mean"] == [(n, 0.01 * n) for n in range(1, 21)]


HERE = socket.gethostname()


@pytest.mark.parametrize(
    ("lock", "seconds_ago", "word"),
    [
        (None, None, "waiting"),
        ("process OWN on HERE", None, "running"),
        ("process OWN on HERE", 300, "running"),  # a step is planned to take 36 s
        ("process OWN on HERE", 7200, "silent"),
        ("process 4194999 on HERE", 7200, "ended"),
        ("process 4194999 on HERE", 5, "ended"),
        ("process 1 on elsewhere", 5, "running"),
        ("process 1 on elsewhere", 200, "running"),
        ("process 1 on elsewhere", 7200, "silent"),
        (None, 7200, "silent"),
    ],
)
def test_state_of_a_run(
    tmp_path: Path, lock: str | None, seconds_ago: float | None, word: str
) -> None:
    folder = started_run(tmp_path / "run")
    if lock is not None:
        own = lock.replace("OWN", str(os.getpid())).replace("HERE", HERE)
        (folder / "run.lock").write_text(own + "\n")
    if seconds_ago is not None:
        append(folder / "metrics.jsonl", sft_lines([1]))
        written(folder, seconds_ago=seconds_ago)
    run = LiveRun(folder)
    run.poll()
    state = run.progress.state()
    assert state.word == word
    if word != "waiting":
        said = "began" if seconds_ago is None else "last line"
        said = f"^starting, {said}" if seconds_ago is None and word == "running" else said
        end = f"; python launch.py resume={folder} continues the run" if word == "ended" else ""
        assert re.search(rf"{said} \d+ (s|min|h) ago{end}$", state.text)
    finish(folder)
    assert RunProgress(folder).state().word == "finished"


def test_a_run_that_misses_many_steps_is_late_until_its_phase_ends(tmp_path: Path) -> None:
    folder = started_run(tmp_path / "run")
    run = LiveRun(folder)
    (folder / "run.lock").write_text(f"process {os.getpid()} on {HERE}\n")
    for step, age in ((1, 43), (2, 42), (3, 41)):
        append(folder / "metrics.jsonl", sft_lines([step]))
        written(folder, seconds_ago=age)
        run.poll()
    assert run.headline().text.startswith("may be hanging: a step takes 1 s, last line 41 s ago, ")
    assert run.headline().is_doubtful
    (folder / "sft").mkdir()
    (folder / "sft" / "result.json").write_text("{}")
    assert run.progress.state().word == "running", "the next phase loads its models"
    (folder / "sft" / "result.json").unlink()
    append(folder / "metrics.jsonl", sft_lines([4]))
    written(folder, seconds_ago=25)
    run.poll()
    assert run.headline().text.startswith("running, last line 25 s ago, 0:")
    assert run.headline().is_doubtful is None, "neither good nor bad yet"


@pytest.mark.parametrize("jump", [-3600, 3600])
def test_a_clock_that_is_set_changes_neither_the_pace_nor_the_age(
    jump: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, now = started_run(tmp_path / "run"), time.time
    run = LiveRun(folder)
    (folder / "run.lock").write_text(f"process {os.getpid()} on {HERE}\n")
    for step, age in ((1, 45), (2, 35), (3, 25), (4, 15)):
        if step == 3:
            monkeypatch.setattr(time, "time", lambda: now() + jump)
            assert run.headline().text.startswith("running, last line 35 s ago, 0:")
        append(folder / "metrics.jsonl", sft_lines([step]))
        written(folder, seconds_ago=age)
        run.poll()
        if step > 1:
            assert run.progress.pace == pytest.approx(10, abs=0.5)
    assert run.headline().text.startswith("running, last line 15 s ago, 0:")


def test_ages_have_one_unit() -> None:
    ages = {5.2: "5 s", 119: "119 s", 150: "2 min", 7300: "2 h", 400_000: "5 days"}
    assert {seconds: age_text(seconds) for seconds in ages} == ages
