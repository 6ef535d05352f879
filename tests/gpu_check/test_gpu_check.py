"""The command gpu_check: parts that end badly, its page, its exit codes, and one part for real."""

import json
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rlhf.base.program import LAUNCHER
from rlhf.gpu_check import __main__ as command
from rlhf.gpu_check import runs
from rlhf.gpu_check.processes import run_part
from rlhf.gpu_check.rows import (
    CheckPart,
    CheckResults,
    CheckRow,
    RowVerdict,
    Size,
    read_parts,
    write_results,
)
from rlhf.gpu_check.runs import EndedRun
from tests.documents import read_document
from tests.pretend_cuda.gpu import Gpu, missing_to_pretend
from tests.runs import ROOT, python, wait_for
from tests.runtime.test_resume import is_there

PASSED = CheckRow(what="card", figure="H|100", expected="", verdict=RowVerdict.passed, seconds=1.25)
FAILED = replace(PASSED, what="loss", figure="nan", expected="5.7", verdict=RowVerdict.failed)
FAILED = replace(FAILED, seconds=2.0, numbers={"a": 1})
SKIPPED = replace(PASSED, verdict=RowVerdict.skipped)


def part(name: str, *rows: CheckRow) -> CheckPart:
    """A part with remedies, which has measured ``rows``."""
    remedies = {"loss": "zero=stage1", "score": "zero=stage1"}
    first, seconds = read_parts()[0], 61 if rows else 0
    named = replace(first, name=name, title=name.title(), remedies=remedies)
    return replace(named, rows=list(rows), seconds=seconds)


def planted(name: str, folder: Path, seconds: float = 30) -> list[CheckRow]:
    """The rows of a planted part."""
    run, module = part(name), "tests.gpu_check.planted_part"
    shown = list(run_part(run, folder / name, Size.tiny, seconds, module))
    assert shown == run.rows
    return shown


@pytest.mark.parametrize(
    ("name", "figures"),
    [
        ("well", ["1"]),
        ("raises", ["1", "ZeroDivisionError: division by zero", "1"]),
        ("crashes", ["1", "ended by SIGSEGV; see {log}"]),
        ("exits", ["1", "exit code 3; see {log}"]),
        ("stuck", ["1", "exit code 1; see {log}"]),
        ("nothing", ["it measured nothing; see {log}"]),
    ],
)
def test_the_end_of_a_part_is_a_row(name: str, figures: list[str], tmp_path: Path) -> None:
    rows = planted(name, tmp_path)
    log = tmp_path / name / "log.txt"
    assert [row.figure for row in rows] == [figure.format(log=log) for figure in figures]
    failed = [row.verdict is RowVerdict.failed for row in rows]
    assert failed == [row.figure != "1" for row in rows]
    assert ("Traceback" in log.read_text()) == (name == "raises")
    assert ("planted_part.py" in log.read_text()) == (name in ("raises", "stuck", "crashes"))


def test_a_part_that_hangs_is_killed_with_all_that_it_started(tmp_path: Path) -> None:
    rows = planted("hangs", tmp_path, seconds=2.5)
    assert [row.verdict for row in rows] == [RowVerdict.passed, RowVerdict.failed]
    assert rows[1].figure.startswith("not finished after 0.0 minutes, so it was killed; see ")
    child = int((tmp_path / "hangs" / "child").read_text())
    wait_for(lambda: not is_there(child), seconds=5)


def test_a_part_without_time_left_fails(tmp_path: Path) -> None:
    (row,) = planted("well", tmp_path, seconds=0)
    assert "no time was left" in row.figure
    assert row.verdict is RowVerdict.failed


def test_the_page_says_what_failed(tmp_path: Path) -> None:
    failing = [PASSED, FAILED, replace(FAILED, what="score"), replace(FAILED, what="speed")]
    parts = [part("one", PASSED), part("two", *failing), part("three", SKIPPED)]
    check = CheckResults(started="now", command="python", parts=[*parts, part("four")])
    write_results(tmp_path, check)
    page = (tmp_path / "gpu_check.md").read_text()
    first = "Works here: One. Cannot run here: Three. Fails: Two. Not run yet: four. Set: "
    assert page.startswith(f"{first}zero=stage1; no override avoids Two, speed.\n\n# GPU check\n")
    assert "Started now with `python`, 3.0 minutes so far. " in page
    assert "Card: **H|100**." in page
    assert "- **Two, loss**: nan (expected: 5.7)" in page
    assert "## Two\n\n1 passed, 3 failed; 61.0 seconds. " in page
    assert "| card | H\\|100 |  | ✓ passed | 1.2 |" in page
    stored = json.loads((tmp_path / "gpu_check.json").read_text())
    assert stored["failed"] == ["two"]
    assert stored["waiting"] == ["four"]
    assert stored["parts"][1]["rows"][1] == vars(FAILED)


def run_main(
    monkeypatch: pytest.MonkeyPatch, folder: Path, rows: Sequence[CheckRow]
) -> tuple[int, list[dict[str, Any]]]:
    """The exit code, and what was on the drive when each part began."""
    before = []

    def fake(part: CheckPart, *_: object) -> Iterator[CheckRow]:
        file = folder / "gpu_check.json"
        before.append(json.loads(file.read_text()) if file.exists() else {})
        part.rows.extend(rows)
        yield from rows

    monkeypatch.setattr(command, "run_part", fake)
    return command.main([str(folder), "--only", "machine", "resume", "--json"]), before


def test_exit_codes_and_a_page_after_every_part(
    gpu: Gpu, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, before = run_main(monkeypatch, tmp_path / "good", [PASSED, SKIPPED])
    assert code == 0
    assert before[0] == {}
    assert before[1]["waiting"] == ["resume"]
    assert read_document("gpu_check", capsys.readouterr().out)["failed"] == []
    assert run_main(monkeypatch, tmp_path / "bad", [PASSED, FAILED])[0] == 1
    printed = read_document("gpu_check", capsys.readouterr().out)
    assert printed == json.loads((tmp_path / "bad" / "gpu_check.json").read_text())
    assert run_main(monkeypatch, tmp_path / "bad", [PASSED])[0] == 2
    refused = read_document("gpu_check", capsys.readouterr().out)["error"]
    assert (refused["key"], refused["value"]) == ("OUT_FOLDER", str(tmp_path / "bad"))
    assert (refused["rule"], refused["remedy"]) == ("is not an empty folder", "name a new one")


def test_wrong_options_and_no_gpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main([str(tmp_path), "--minutes", "nan"]) == 2
    assert capsys.readouterr().err == "error: --minutes nan: must be above 0\n"
    assert command.main([str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: python -m rlhf.gpu_check needs a GPU: torch finds no GPU here; ")
    with pytest.raises(SystemExit) as end:
        command.main(["--only", "coffee"])
    assert end.value.code == 2
    assert list(tmp_path.iterdir()) == []


def test_launcher_is_there_and_a_failed_run_says_why(tmp_path: Path) -> None:
    assert LAUNCHER == ROOT / "launch.py"
    output = "error: ppo.gamma=2: too large\nbye\n"
    run = EndedRun(run_dir=tmp_path, code=2, output=output, seconds=1.0)
    assert run.last_line == "ppo.gamma=2: too large"
    with pytest.raises(Exception, match=r"exit code 2: ppo\.gamma=2"):
        _ = run.metrics


@pytest.mark.parametrize(("before", "limit"), [([], 600), ([20.0], 240), ([300.0, 20.0], 1200)])
def test_a_slow_run_raises_the_limit_of_later_runs(
    before: list[float], limit: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine with a cold drive took 40 s to import torch, and later runs were killed."""
    monkeypatch.setattr(runs, "RUN_SECONDS", before)
    assert runs.limit_of_run() == limit


def test_words_of_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    table = {"two": 'ONE b=2 "c={d: e}"', "one": "a=1 b=1"}
    monkeypatch.setattr(runs, "RUNS", table)
    assert runs.expand_words("TWO A=TWO") == ["a=1", "b=1", "b=2", "c={d: e}", "A=TWO"]
    monkeypatch.setattr(runs, "_run_launcher", lambda _, words: words)
    place = "model.path=/a folder/TWO"
    words = runs.run_to_end(tmp_path, "TWO A=TWO a=3", place)  # the last of a key counts
    assert words == ["a=3", "b=2", "c={d: e}", "A=TWO", place, f"run_dir={tmp_path}"]


@pytest.mark.soak
@pytest.mark.skipif(missing_to_pretend() is not None, reason=str(missing_to_pretend()))
def test_the_command_finds_a_gpu_also_in_its_parts(tmp_path: Path) -> None:
    words = ["-m", "tests.pretend_cuda", "-m", "rlhf.gpu_check", tmp_path / "out"]
    run = python(*words, "--only", "machine", popen=subprocess.Popen)
    assert run.returncode == 0, run.stdout + run.stderr
    page = (tmp_path / "out" / "gpu_check.md").read_text()
    assert "| card | NVIDIA A100-SXM4-40GB, sm_80, 39.4 GiB; 1 found |" in page
    assert "| hardware=auto | a100_40g: 1 x NVIDIA A100-SXM4-40GB" in page
