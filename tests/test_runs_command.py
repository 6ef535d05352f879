"""The registry of runs: what it says of a run, from its files alone, and what it removes."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from rlhf.config.freeze import flatten_keys
from rlhf.report.comparison import scan_keys
from rlhf.runs.__main__ import main
from rlhf.runs.registry import FoundRun, parse_value
from tests.conftest import Compose
from tests.documents import read_document
from tests.watch.watched import RESULT, append, ppo_lines, started_run

Capture = pytest.CaptureFixture[str]
CONFIG = "name: pets\nseed: 3\nppo:\n  rollout_batch_size: 16\nreward_model:\n  init: sft\n"


def a_run(folder: Path, *words: str, objective: float | None = None, at: int = 0) -> Path:
    """Make a run directory with a step of PPO; with an objective it has finished."""
    started_run(folder)
    (folder / "config.yaml").write_text(CONFIG)
    (folder / "command.txt").write_text(" ".join(["python launch.py", *words]) + "\n")
    append(folder / "metrics.jsonl", ppo_lines([4]))
    if objective is not None:
        (folder / "result.json").write_text(json.dumps(RESULT | {"objective": objective}))
    os.utime(folder / "command.txt", (1_700_000_000 + at,) * 2)
    return folder


def listed(capsys: Capture, *words: object) -> list[dict[str, Any]]:
    assert main([*map(str, words), "--json"]) == 0
    rows: list[dict[str, Any]] = read_document("runs", capsys.readouterr().out)["runs"]
    return rows


def test_yaml_of_omegaconf_is_read_key_by_key(compose: Compose) -> None:
    words = ["+rewards.right={kind: number, columns: ['a: b', 'c']}", "rollout.stop=['\\n\\nc: d']"]
    config = compose(["data=deepspeed_chat", f"name='{'long: name ' * 20}'", *words])
    text = OmegaConf.to_yaml(config)
    values = flatten_keys(OmegaConf.to_container(config))
    assert {key: parse_value(value) for key, value in scan_keys(text).items()} == values


def test_a_run_says_what_became_of_it(tiny_run: Path, capsys: Capture) -> None:
    (row,) = listed(capsys, tiny_run)
    result = json.loads((tiny_run / "result.json").read_text())
    read_document("plan", (tiny_run / "plan.json").read_text())
    assert row["state"] == "finished"
    assert (row["phase"], row["step"]) == ("ppo", result["phases"]["ppo"]["steps"])
    assert row["finished"] == ["sft", "reward", "ppo"]
    assert row["objective"] == result["objective"]
    assert row["gain_ci"] == result["phases"]["ppo"]["exact_gain_ci"]
    files = [path for path in tiny_run.rglob("*") if path.is_file() and not path.is_symlink()]
    assert row["bytes"] == sum(path.stat().st_size for path in files)
    assert not any(word.startswith("run_dir=") for word in row["changes"])
    assert main([str(tiny_run)]) == 0
    first, second, last = capsys.readouterr().out.splitlines()
    assert first.split()[0] == str(tiny_run)
    assert second.startswith("    finished, began ")
    assert " ," not in second, "a gain without an interval is left out"
    assert last.startswith("1 runs; ")


def test_runs_are_filtered_by_fields_and_keys_and_sorted(tmp_path: Path, capsys: Capture) -> None:
    a_run(tmp_path / "x" / "good", "seed=3", objective=0.9, at=2)
    a_run(tmp_path / "x" / "bad", objective=0.1, at=3)
    stopped = a_run(tmp_path / "y" / "stopped", at=1)
    (stopped / "config.yaml").write_text("name: other\nseed: 4\n")
    (tmp_path / "latest").symlink_to(stopped)

    def names(*words: object) -> list[str]:
        return [Path(row["folder"]).name for row in listed(capsys, tmp_path, *words)]

    assert names() == ["stopped", "good", "bad"], "the oldest first, and each once"
    assert names("state=finished") == ["good", "bad"]
    assert names("state=finished", "objective=0.9") == ["good"]
    assert names("seed=4") == names("name=o*") == ["stopped"]
    assert names("ppo.rollout_batch_size=16", "--sort", "objective") == ["bad", "good"]
    assert names("--sort", "seed") == ["good", "bad", "stopped"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["sed=3"], "sed: no run has this key; did you mean seed or"),
        (["--sort", "objectiv"], "objectiv: no run has this key; did you mean objective?"),
        (["missing"], "missing: there is no such folder"),
        (["diff", "."], "diff compares two runs, and got 1"),
    ],
)
def test_words_that_mean_nothing_are_refused(
    words: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    a_run(tmp_path / "runs" / "a")
    monkeypatch.chdir(tmp_path)
    assert main(words) == 2
    assert said in capsys.readouterr().err


def test_a_failed_job_gives_its_reason(tmp_path: Path, capsys: Capture) -> None:
    run = a_run(tmp_path / "sweep" / "0")
    (run / "job.lock").touch()
    (run / "run.lock").write_text(f"process 999999999 on {os.uname().nodename}\n")
    (run / "output.log").write_text("step 4\nerror: ppo.lr=-1: must be above 0\n")
    (row,) = listed(capsys, tmp_path)
    assert (row["state"], row["reason"]) == ("failed", "error: ppo.lr=-1: must be above 0")
    assert row["parents"] == {"sweep": str(tmp_path / "sweep")}


def test_damaged_files_are_no_obstacle(tmp_path: Path, capsys: Capture) -> None:
    run = a_run(tmp_path / "a")
    for name in ("result.json", "command.txt", "alarms.jsonl", "config.yaml"):
        (run / name).write_bytes(b"\xff{'")
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"phase": "ppo", "st')
    (row,) = listed(capsys, tmp_path)
    assert (row["step"], row["objective"], row["changes"], row["alarms"]) == (4, None, [], {})


def test_two_runs_differ_in_settings_and_results(tmp_path: Path, capsys: Capture) -> None:
    runs = [a_run(tmp_path / str(seed), objective=seed / 10) for seed in (3, 5)]
    config = (runs[1] / "config.yaml").read_text()
    (runs[1] / "config.yaml").write_text(config.replace("seed: 3", "seed: 5"))
    assert main(["diff", *map(str, runs), "--json"]) == 0
    found = read_document("runs", capsys.readouterr().out)
    assert found["settings"] == {"seed": [3, 5]}
    assert found["results"] == {"objective": [0.3, 0.5]}
    assert main(["diff", *map(str, runs)]) == 0
    assert "  seed: 3 -> 5\n" in capsys.readouterr().out


def test_the_tree_shows_a_run_below_its_source(tmp_path: Path, capsys: Capture) -> None:
    first = a_run(tmp_path / "first", objective=0.2)
    for name, source in (("second", first), ("third", tmp_path / "second"), ("lone", "/gone")):
        run = a_run(tmp_path / name)
        with (run / "config.yaml").open("a") as file:
            file.write(f"from_run: {source}\n")
    assert main(["tree", str(tmp_path)]) == 0
    lines = [re.sub("  (finished|running)$", "", line) for line in out_lines(capsys)]
    assert lines[:3] == [str(first), f"  {tmp_path / 'second'}", f"    {tmp_path / 'third'}"]
    assert lines[3:] == ["/gone (not among the listed runs)", f"  {tmp_path / 'lone'}"]


def out_lines(capsys: Capture) -> list[str]:
    return capsys.readouterr().out.splitlines()


def test_only_what_no_command_needs_is_removed(tmp_path: Path, capsys: Capture) -> None:
    done, half = a_run(tmp_path / "done", objective=0.5), a_run(tmp_path / "half")
    for run in (done, half):
        (run / "ppo" / "state" / "step-00000004").mkdir(parents=True)
        (run / "ppo" / "state" / "step-00000004" / "weights").write_bytes(b"12345")
        (run / "ppo" / "actor").mkdir()
    begun = started_run(tmp_path / "begun")
    abandoned = started_run(tmp_path / "abandoned")
    os.utime(abandoned / "config.yaml", (1_700_000_000,) * 2)
    everything = {path for path in tmp_path.rglob("*")}
    assert main(["clean", str(tmp_path)]) == 0
    assert "2 folders" in out_lines(capsys)[-1]
    assert {path for path in tmp_path.rglob("*")} == everything, "dry by default"
    assert main(["clean", str(tmp_path), "--remove", "--json"]) == 0
    found = read_document("runs", capsys.readouterr().out)["found"]
    assert [(row["folder"], row["what"]) for row in found] == [
        (str(abandoned), "run without a step"),
        (str(done / "ppo" / "state" / "step-00000004"), "checkpoint of ppo"),
    ]
    assert found[1]["bytes"] == 5
    assert not abandoned.exists()
    assert begun.exists()
    assert not any((done / "ppo" / "state").iterdir())
    assert (half / "ppo" / "state" / "step-00000004" / "weights").exists()
    assert (done / "ppo" / "actor").is_dir()
    assert FoundRun(done).state == "finished"


@pytest.mark.parametrize("place", ["ppo", "ppo/state", "ppo/state/step-00000004"])
def test_nothing_is_removed_through_a_link(place: str, tmp_path: Path, capsys: Capture) -> None:
    done, other = a_run(tmp_path / "here/done", objective=0.5), a_run(tmp_path / "other")
    (other / "ppo/state/step-00000004").mkdir(parents=True)
    (done / place).parent.mkdir(parents=True, exist_ok=True)
    (done / place).symlink_to(other / place)
    assert main(["clean", str(tmp_path / "here"), "--remove"]) == 0
    assert "0 folders" in out_lines(capsys)[-1]
    assert (other / "ppo/state/step-00000004").is_dir()
    assert (done / place).is_symlink()


DEEP = "[" * 50_000


def with_result(**changes: object) -> str:
    return json.dumps(RESULT | {"phases": {"ppo": changes}})


DAMAGES = {
    "a bomb": (
        "config.yaml",
        "name: [&a [x,x], " + "&b [*a,*a,*a,*a,*a,*a,*a], " * 8 + "1]\nseed: 1\n",
    ),
    "a loop": ("config.yaml", "name: &a [*a]\n"),
    "no date": ("config.yaml", "name: 2020-13-45\n"),
    "a date": ("config.yaml", "name: 2020-01-05\n"),
    "bytes": ("config.yaml", "name: !!binary aGk=\n"),
    "a set": ("config.yaml", "name: !!set {a}\n"),
    "digits": ("config.yaml", f"name: {'9' * 6000}\n"),
    "a NUL": ("config.yaml", 'name: x\nfrom_run: "\\0"\n'),
    "a long command": ("command.txt", "python launch.py " + "x" * 3_000_000),
    "a deep line": ("metrics.jsonl", DEEP),
    "a deep alarm": ("alarms.jsonl", DEEP),
    "half an interval": ("result.json", with_result(gold_gain_ci=[1.0])),
    "a judge of one": ("result.json", with_result(judge_gains={"y": [1]})),
    "a source with a NUL": ("result.json", with_result(reused_from="\0")),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_run_does_not_hide_the_others(name: str, tmp_path: Path, capsys: Capture) -> None:
    damaged = a_run(tmp_path / "damaged", objective=0.2)
    a_run(tmp_path / "good", objective=0.2)
    file, text = DAMAGES[name]
    (damaged / file).write_text(text)
    here = str(tmp_path)
    for words in ([here], [here, "--json"], [here, "--sort", "name"], [here, "name=pets"]):
        assert main(words) == 0
        assert "good" in capsys.readouterr().out
    assert main(["tree", here]) == main(["clean", here]) == 0


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("/dev/zero")])
def test_what_is_no_regular_file_does_not_hide_other_runs(
    make: Callable[[Path], None], tmp_path: Path, capsys: Capture
) -> None:
    a_run(tmp_path / "good", objective=0.2)
    for name in ("config.yaml", "command.txt", "metrics.jsonl", "alarms.jsonl", "output.log"):
        damaged = a_run(tmp_path / name)
        (damaged / name).unlink(missing_ok=True)
        make(damaged / name)
    rows = listed(capsys, tmp_path)
    assert len(rows) == 6
