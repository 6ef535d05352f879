"""The screen of the terminal: what it says, and that it fits."""

from __future__ import annotations

import json
import os
import re
import socket
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console as RichConsole

from rlhf.run.console import Console
from rlhf.watch import __main__ as command
from rlhf.watch import __main__ as terminal
from rlhf.watch.__main__ import build_draw_function, draw_trend
from tests.documents import read_document
from tests.watch.watched import alarm, append, finish, ppo_lines, sample, sft_lines, started_run


def screen(folder: Path) -> list[str]:
    """Lines of what a terminal of 80 columns and 24 lines shows."""
    file = StringIO()
    RichConsole(file=file, width=80, height=24).print(build_draw_function(folder)())
    lines = file.getvalue().splitlines()
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 80
    return lines


def full_run(folder: Path) -> Path:
    started_run(folder)
    append(folder / "metrics.jsonl", [*sft_lines(range(1, 11)), *ppo_lines(range(1, 11))])
    long = "word " * 100
    append(folder / "alarms.jsonl", [alarm(3), alarm(4, long), alarm(5, f"\x1b[31m{long}")])
    append(folder / "samples.jsonl", [sample(0, f"old\n{long}"), sample(10, f"new [red]{long}")])
    return folder


def test_a_running_run_fills_one_screen(tmp_path: Path) -> None:
    lines = screen(full_run(tmp_path / "run"))
    text = "\n".join(lines)
    assert lines[0] == "pets, seed 3"
    reached = "0:24:00 left, score of rollouts 0.010 → 0.100 so far, alarms: 3"
    assert " ".join(map(str.strip, lines[1:3])) == f"running, last line 0 s ago, {reached}"
    assert re.search(r"^ppo +█{4}░{12} +10/40 +36 +0:\d\d:\d\d left +0:24:00$", text, re.MULTILINE)
    assert re.search(r"^Score +0\.10 +▁▂▃▃▄▅▆▆▇█$", text, re.MULTILINE)
    assert "alarm clipping: ppo/clipfrac=0.5 at ppo step 5" in text
    assert "step 3. " not in text, "older alarms make room"
    shown = re.findall(r"^alarm clipping.*(?:\nword.*)*", text, re.MULTILINE)
    assert [each.count("\n") for each in shown] == [0, 2], "the last has room for its advice"
    assert "Name a pet." in text
    assert "step 0: old word" in text
    assert "step 10: new [red]word" in text
    assert "\x1b" not in text


def test_a_finished_run_and_a_sweep_are_shown(tmp_path: Path) -> None:
    finished = full_run(tmp_path / "sweep" / "ppo.kl_ctl=0.1,ppo.cliprange=0.1,seed=1")
    finish(finished)
    started_run(tmp_path / "sweep" / "ppo.kl_ctl=0.2,ppo.cliprange=0.1,seed=1")
    assert screen(finished)[1] == "finished; objective 0.750, of no phase; 3 reasons to doubt it"
    text = "\n".join(screen(tmp_path / "sweep"))
    assert "1 of 2 jobs finished" in text
    (job, _) = read_document("watch", json.dumps(command.read_snapshot(tmp_path / "sweep")))["jobs"]
    assert (job["state"], job["so_far"]) == ("finished", "objective 0.750")
    assert re.search(r"kl_ctl=0.1\S+ +finished +ppo 10 of 40 +objective 0.750", text)
    assert re.search(r"kl_ctl=0.2\S+ +waiting", text)


def test_trends_are_between_the_lowest_and_the_highest_value() -> None:
    assert draw_trend([(n, float(n)) for n in range(8)]) == "▁▂▃▄▅▆▇█"
    assert draw_trend([(0, 7.0), (1, 7.0)]) == "▁▁"
    assert draw_trend([]) == ""
    assert draw_trend([(n, float(n >= 300)) for n in range(600)]) == "▁" * 15 + "▂" + "█" * 16


def test_ctrl_c_leaves_the_screen_and_without_a_terminal_it_is_printed_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = full_run(tmp_path / "run")

    def interrupt(_: float) -> None:
        raise KeyboardInterrupt

    assert command.main([str(folder), "--json"]) == 0
    found = read_document("watch", capsys.readouterr().out)
    assert (found["phase"], found["state"]) == ("ppo", "running")
    monkeypatch.setattr(terminal.time, "sleep", interrupt)
    assert command.main([str(folder), "--terminal"]) == 0
    assert "pets, seed 3" in capsys.readouterr().out

    file = StringIO()
    real = Console(file=file, force_terminal=True, width=80)
    monkeypatch.setattr(terminal, "Console", lambda **_: real)
    assert command.main([str(folder), "--terminal"]) == 0
    shown, _, rest = file.getvalue().partition("\x1b[?1049l")
    assert "pets, seed 3" in shown
    assert "Traceback" not in rest
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("given", ["", "runs/latest"])
def test_a_run_that_has_just_begun_is_watched_before_runs_latest_names_it(
    given: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    full_run(tmp_path / "runs/pets/old")
    (tmp_path / "runs/latest").symlink_to("pets/old")
    lock = started_run(tmp_path / "runs/pets/new") / "run.lock"
    for process, expected in ((os.getpid(), "new"), (999_999_999, "old")):
        lock.write_text(f"process {process} on {socket.gethostname()}\n")
        assert command.main([*given.split(), "--json"]) == 0
        assert read_document("watch", capsys.readouterr().out)["folder"].endswith(expected)
