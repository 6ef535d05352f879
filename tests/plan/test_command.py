"""``plan=only`` and ``plan=check`` as users type them."""

import json
from pathlib import Path

import pytest

from rlhf.config.freeze import to_run_config, write_frozen_config
from rlhf.plan.plan_tables import plan_as_json, plan_summary
from tests.plan.planned import Compose, plan_of
from tests.runs import launch

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
PROFILES = sorted(path.stem for path in (ROOT / "conf" / "hardware").glob("*.yaml"))


@pytest.mark.parametrize("hardware", PROFILES)
def test_every_profile_answers(hardware: str, compose: Compose) -> None:
    plan = plan_of(compose, "model=opt_1.3b", f"hardware={hardware}", "phase=sft")
    assert plan_summary(plan)
    assert plan_as_json(plan)["fits"] == plan.fits


@pytest.mark.parametrize(("hardware", "code"), [("cpu", 2), ("64xa100_80g", 0)])
def test_command_prints_and_writes_the_plan(hardware: str, code: int, tmp_path: Path) -> None:
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "plan.json").write_text("{}")  # of an earlier plan in the same folder
    memory = ["hardware.memory_gib=9"] if hardware == "cpu" else []
    given = ("plan=only", "model=opt_13b", f"hardware={hardware}", "run_dir=here", "phase=sft")
    run = launch(*given, *memory, cwd=tmp_path)
    assert run.returncode == code, run.stderr
    assert [path.name for path in tmp_path.rglob("*")] == ["here", "plan.json"]
    assert ("does not fit" in run.stdout) == (code == 2)
    plan = json.loads((tmp_path / "here" / "plan.json").read_text())
    assert plan["fits"] == (code == 0)
    assert {"weights", "process"} < set(plan["phases"]["sft"]["memory"])


def test_a_sweep_prints_a_line_for_each_and_leaves_no_file(tmp_path: Path) -> None:
    words = ("plan=only", "model=opt_1.3b", "phase=sft", "hardware=a100_40g,a100_80g")
    run = launch("-m", *words, cwd=tmp_path)
    assert run.returncode == 0, run.stderr
    lines = [line for line in run.stdout.splitlines() if line.startswith("model=opt_1.3b ")]
    names = [line.split(":")[0].split()[-1] for line in lines]
    assert names == ["hardware=a100_40g", "hardware=a100_80g"]
    assert all("$" in line for line in lines)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.soak
def test_a_folder_of_a_sweep_that_was_asked_for_is_made(tmp_path: Path) -> None:
    run = launch("-m", "plan=only", "seed=1,2", "hydra.sweep.dir=here", cwd=tmp_path)
    assert run.returncode == 0, run.stderr
    assert (tmp_path / "here" / "multirun.yaml").is_file()


def test_the_folder_of_a_run_takes_no_plan(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("seed: 1\n")
    run = launch("plan=only", "run_dir=.", cwd=tmp_path)
    assert run.returncode == 2
    assert run.stderr.startswith("error: run_dir=. already holds a run: ")
    assert [path.name for path in tmp_path.iterdir()] == ["config.yaml"]


def test_the_plan_of_a_stopped_run_changes_nothing(compose: Compose, tmp_path: Path) -> None:
    write_frozen_config(to_run_config(compose(["ppo.steps=7"])), tmp_path)
    frozen = (tmp_path / "config.yaml").read_text()
    run = launch("resume=.", "plan=only", cwd=tmp_path)
    assert run.returncode == 0, run.stderr
    assert "ppo 7 steps" in " ".join(run.stdout.split())
    assert [path.name for path in tmp_path.iterdir()] == ["config.yaml"]
    assert (tmp_path / "config.yaml").read_text() == frozen


def test_a_folder_with_a_plan_and_no_run_cannot_go_on(compose: Compose, tmp_path: Path) -> None:
    write_frozen_config(to_run_config(compose(["plan=only"])), tmp_path)
    run = launch("resume=.", cwd=tmp_path)
    assert (run.returncode, run.stdout) == (2, "")
    assert run.stderr.startswith(f"error: resume={tmp_path}: plan=only made this folder")
    assert "add plan=check" in run.stderr


def test_what_cannot_fit_is_refused_before_anything_is_made(tmp_path: Path) -> None:
    run = launch("model=opt_13b", "hardware=a100_80g", "zero=stage1", "phase=sft", cwd=tmp_path)
    assert run.returncode == 2
    assert run.stderr.startswith("error: sft needs ")
    assert "zero=auto" in run.stderr
    assert "lora=all" in run.stderr
    assert "Traceback" not in run.stderr
    assert list(tmp_path.iterdir()) == []
