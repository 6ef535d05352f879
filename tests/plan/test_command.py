"""``plan=only`` and ``plan=check`` as users type them."""

from __future__ import annotations

import json
import socket
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from rlhf.config.freeze import to_run_config, write_frozen_config
from rlhf.config.run_dir import make_run_dir
from rlhf.plan.decide import plan_and_configure
from rlhf.plan.plan_tables import plan_as_json, plan_summary
from tests.plan.planned import Compose
from tests.runs import launch

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
PROFILES = sorted(path.stem for path in (ROOT / "conf" / "hardware").glob("*.yaml"))


def check_plan(plan: dict[str, Any], *, fits: bool) -> None:
    assert plan["fits"] == fits
    assert set(plan["phases"]) == {"sft", "reward", "ppo"}
    assert {"weights", "process"} < set(plan["phases"]["ppo"]["memory"])


@pytest.mark.parametrize("hardware", PROFILES)
def test_every_profile_answers(hardware: str, compose: Compose) -> None:
    config = to_run_config(compose(["plan=only", "model=opt_13b", f"hardware={hardware}"]))
    plan = plan_and_configure(config).plan
    assert plan is not None
    assert plan_summary(plan)
    check_plan(plan_as_json(plan), fits=plan.fits)


@pytest.mark.parametrize("hardware", ["cpu", "64xa100_80g"])
def test_command_prints_and_writes_the_plan(hardware: str, tmp_path: Path) -> None:
    given = ("plan=only", "model=opt_13b", f"hardware={hardware}", "run_dir=here")
    run = launch(*given, cwd=tmp_path)
    assert run.returncode == (2 if "does not fit" in run.stdout else 0), run.stderr
    assert [path.name for path in tmp_path.rglob("*")] == ["here", "plan.json"]
    assert "fit" in run.stdout
    plan = json.loads((tmp_path / "here" / "plan.json").read_text())
    check_plan(plan, fits="does not fit" not in run.stdout)


@pytest.mark.parametrize("sweep", [(), ("-m", "seed=1,2")], ids=["one", "sweep"])
def test_a_plan_leaves_no_file_that_was_not_asked_for(
    sweep: tuple[str, ...], tmp_path: Path
) -> None:
    run = launch(*sweep, "plan=only", cwd=tmp_path)
    assert run.returncode == 0, run.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_folder_of_a_sweep_that_was_asked_for_is_made(tmp_path: Path) -> None:
    run = launch("-m", "plan=only", "seed=1,2", "hydra.sweep.dir=here", cwd=tmp_path)
    assert run.returncode == 0, run.stderr
    assert (tmp_path / "here" / "multirun.yaml").is_file()


def test_a_plan_may_be_repeated_in_its_folder(compose: Compose, tmp_path: Path) -> None:
    plan = tmp_path / "here" / "plan.json"
    for seed in (1, 2):
        (tmp_path / "here").mkdir(exist_ok=True)
        plan.write_text("{}")
        run = launch("plan=only", "run_dir=here", f"seed={seed}", cwd=tmp_path)
        assert run.returncode == 0, run.stderr
        assert json.loads(plan.read_text())["fits"]
    config = to_run_config(compose([f"run_dir={plan.parent}"]))
    assert make_run_dir(config, job_dir=None, now=datetime.now()) == plan.parent


def test_the_folder_of_a_run_takes_no_plan(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("seed: 1\n")
    run = launch("plan=only", "run_dir=.", cwd=tmp_path)
    assert run.returncode == 2
    assert run.stderr.startswith("error: run_dir=. already holds a run: ")
    assert [path.name for path in tmp_path.iterdir()] == ["config.yaml"]


@pytest.mark.parametrize("mode", ["check", "only"])
def test_the_plan_of_a_stopped_run_changes_nothing(
    mode: str, compose: Compose, tmp_path: Path
) -> None:
    write_frozen_config(to_run_config(compose([f"plan={mode}", "ppo.steps=7"])), tmp_path)
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
    assert run.stderr == (
        f"error: resume={tmp_path}: plan=only made this folder, and no run began in it; "
        "add plan=check to begin the run\n"
    )


def test_started_ranks_are_not_planned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
    rank = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost"}
    for name, value in (rank | {"MASTER_PORT": str(port)}).items():
        monkeypatch.setenv(name, value)
    run = launch("plan=only", cwd=tmp_path)
    message = "error: plan=only: the ranks have been started; start launch.py without torchrun\n"
    assert (run.returncode, run.stdout, run.stderr) == (2, "", message)


def test_what_cannot_fit_is_refused_before_anything_is_made(tmp_path: Path) -> None:
    command = ("model=opt_13b", "model@reward_model=opt_350m", "hardware=a100_80g", "zero=stage1")
    run = launch(*command, cwd=tmp_path)
    assert run.returncode == 2
    assert run.stderr.startswith("error: sft needs ")
    assert "zero=auto" in run.stderr
    assert "lora=all" in run.stderr
    assert "Traceback" not in run.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_sweep_prints_a_line_for_each(tmp_path: Path) -> None:
    run = launch("-m", "plan=only", "model=opt_1.3b", "hardware=a100_40g,a100_80g", cwd=tmp_path)
    assert run.returncode == 0, run.stderr
    lines = [line for line in run.stdout.splitlines() if line.startswith("model=opt_1.3b ")]
    assert [line.split(":")[0].split()[-1] for line in lines] == [
        "hardware=a100_40g",
        "hardware=a100_80g",
    ]
    assert all("$" in line for line in lines)
