"""Every command reads the runs of older versions in tests/zoo, each named by version or commit."""

import io
import json
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from rlhf import export, replay
from rlhf.base.cpu import cache_folder
from rlhf.chat import __main__ as chat
from rlhf.compare.preference_file import make_pairs, read_models_of_runs
from rlhf.config.choices import Phase
from rlhf.config.freeze import FROZEN, load_run
from rlhf.evaluate import __main__ as evaluate
from rlhf.jobs.completion import complete_config
from rlhf.jobs.launch_command import Job
from rlhf.report import __main__ as report
from rlhf.runs import __main__ as runs
from rlhf.watch import __main__ as watch
from tests.conftest import Compose
from tests.documents import read_document
from tests.needs_lab import needs_lab
from tests.runs import launch

ZOO = Path(__file__).parent / "zoo"
NAMES = sorted(path.name for path in ZOO.iterdir() if path.is_dir())
OF_LAB = "9e8b9ebe"  # its reward model has two members
MOST_BYTES = 2_000_000
Capture = pytest.CaptureFixture[str]
Main = Callable[[Sequence[str]], int]


@pytest.fixture(params=[pytest.param(n, marks=needs_lab if n == OF_LAB else ()) for n in NAMES])
def run(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A copy of a run in the zoo, as its user has it: its cache is this user's."""
    folder = shutil.copytree(ZOO / request.param, tmp_path / request.param)
    config = folder / FROZEN
    config.write_text(config.read_text().replace("~/.cache/rlhf", str(cache_folder())))
    return folder


def test_the_zoo_is_small() -> None:
    sizes = [path.stat().st_size for path in ZOO.rglob("*") if path.is_file()]
    assert len(NAMES) >= 3
    assert sum(sizes) <= MOST_BYTES


def told(main: Main, capsys: Capture, *words: object) -> str:
    """Return what a command prints; it must succeed."""
    code = main([*map(str, words)])
    said, complaint = capsys.readouterr()
    assert code == 0, complaint
    return said


def test_commands_that_read_logs(run: Path, capsys: Capture) -> None:
    assert "ppo/duplicate_share" not in told(report.main, capsys, run)
    assert (run / "report.html").stat().st_size > 100_000
    read_document("report", told(report.main, capsys, run, "--json"))
    (row,) = read_document("runs", told(runs.main, capsys, run, "--json"))["runs"]
    assert (row["state"], row["finished"]) == ("finished", ["sft", "reward", "ppo"])
    assert read_document("watch", told(watch.main, capsys, run, "--json"))["state"] == "finished"
    assert make_pairs(*read_models_of_runs(run, None), seed=0)


def test_runs_of_all_versions_are_compared(capsys: Capture, tmp_path: Path) -> None:
    shutil.copytree(ZOO, tmp_path / "zoo")
    folders = [tmp_path / "zoo" / name for name in NAMES]
    settings = read_document("report", told(report.main, capsys, *folders, "--json"))["settings"]
    shown = {key for setting in settings for key in setting["values"]}
    assert "ppo.rollout_correction" in shown
    assert not shown & {"zero.sequence_parallel_size", "fused_layers", "environment.kind"}
    told(runs.main, capsys, "diff", *folders[:2])


@pytest.mark.slow
def test_commands_that_use_the_models(
    run: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("hello\n"))
    assert told(chat.main, capsys, run, "--max-tokens", 2, "--seed", 1)
    read_document("evaluate", told(evaluate.main, capsys, run, "--prompts", 2, "--json"))
    for words in ([], ["--checkpoint", "1"]):
        folder = run.parent / f"exported{len(words)}"
        told(export.main, capsys, run, "--out", folder, *words)
        assert (folder / "model.safetensors").is_file()


SMALL = ["ppo.steps=1", "ppo.rollout_batch_size=8", "ppo.mini_batch_size=8", "ppo.eval_prompts=4"]
SMALL += ["rollout.max_response_tokens=4", "hardware=cpu"]


def is_planned(compose: Compose, *words: str, resume: Path | None = None) -> bool:
    """Return True if plan=only can plan the words."""
    given = [*words, "plan=only", *([f"resume={resume}"] if resume else [])]
    job = Job(compose(given), given, is_plan=True, resume=None if resume is None else str(resume))
    return complete_config(job).plan is not None


@pytest.mark.slow
def test_new_runs_start_from_it(run: Path, tmp_path: Path, compose: Compose) -> None:
    words = ["phase=ppo", f"from_run={run}", *SMALL]
    assert is_planned(compose, *words)
    began = launch(*words, "plan=off", f"run_dir={tmp_path / 'new'}", cwd=tmp_path)
    assert began.returncode == 0, began.stderr
    assert f"{run / FROZEN}, of 0.1.0: " in began.stderr
    source = (run / "sft/model/model.safetensors").read_bytes()
    assert (tmp_path / "new/sft/model/model.safetensors").read_bytes() == source


@pytest.mark.slow
def test_it_continues_after_its_checkpoint(run: Path, tmp_path: Path, compose: Compose) -> None:
    for path in (run, run / "ppo"):
        (path / "result.json").unlink()
    assert is_planned(compose, resume=run)
    resumed = launch(f"resume={run}", cwd=tmp_path)
    assert resumed.returncode == 0, resumed.stderr
    assert "ppo: continues after step 1" in resumed.stdout + resumed.stderr
    assert json.loads((run / "result.json").read_text())["phases"]["ppo"]["steps"] == 2
    assert load_run(run).fused_layers == "none", "as it was, not the default"
    assert "fused_layers: none" in (run / FROZEN).read_text()


def test_its_last_step_can_be_taken_again(run: Path, tmp_path: Path) -> None:
    planned = replay.plan_replay(run, None, None)
    assert planned == replay.Replay(Phase.ppo, 1, 2)
    (tmp_path / "again").mkdir()
    replay.copy_run_at_start_step(run, planned, tmp_path / "again")
    assert load_run(tmp_path / "again").ppo == load_run(run).ppo


@needs_lab
def test_keys_that_it_did_not_have_are_no_difference(tmp_path: Path) -> None:
    from rlhf_lab.verify import CheckState, check_command, read_checked_run

    folder = shutil.copytree(ZOO / "4d112ca1", tmp_path / "run")
    checked = read_checked_run(folder, seed=0, replays=0, trusts_run=True)
    doubts = {each.place: each.state for each in check_command(checked)}
    assert doubts["config.yaml, hardware.fp32_logits"] is CheckState.unknown
    assert CheckState.differs not in doubts.values()
