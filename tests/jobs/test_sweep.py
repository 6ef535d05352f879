"""Sweeps and runs that start from others: what is shared is trained once, and changes nothing."""

from __future__ import annotations

import json
import re
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.runs import TINY_RUN, launch, metrics, new_cache, start

pytestmark = pytest.mark.slow

GRID = ("ppo.kl_ctl=0.5,0.28", "seed=1,2")  # the last value and the first seed: TINY_RUN


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished sweep, two by two."""
    cwd = tmp_path_factory.mktemp("sweep")
    run = launch("-m", *TINY_RUN, *GRID, cwd=cwd, RLHF_CACHE=new_cache(cwd / "cache"))
    assert run.returncode == 0, run.stderr
    (cwd / "stdout").write_text(run.stdout)
    (folder,) = (cwd / "runs" / "sweeps").iterdir()
    return folder


def result_of(run_dir: Path) -> dict[str, Any]:
    return json.loads((run_dir / "result.json").read_text())


def job(sweep: Path, kl_ctl: float, seed: int) -> Path:
    return sweep / f"ppo.kl_ctl={kl_ctl},seed={seed}"


def test_jobs_are_runs_named_by_what_differs(sweep: Path) -> None:
    for kl_ctl in (0.5, 0.28):
        runs = [metrics(job(sweep, kl_ctl, seed)) for seed in (1, 2)]
        assert all(lines[-2]["ppo/kl_ctl"] == kl_ctl for lines in runs)
        assert runs[0][0] != runs[1][0], "another seed has other metrics"
    assert sweep.name.startswith("smoke-"), "named by the experiment, and a hash of the command"


def test_equal_phases_are_trained_once(sweep: Path) -> None:
    for seed in (1, 2):
        first, other = (result_of(job(sweep, kl_ctl, seed))["phases"] for kl_ctl in (0.5, 0.28))
        for phase in ("sft", "reward"):
            assert "reused_from" not in first[phase]
            assert other[phase]["reused_from"] == str(job(sweep, 0.5, seed).resolve())
        assert "reused_from" not in other["ppo"]


def test_job_that_reused_phases_equals_a_run_of_its_own(sweep: Path, tiny_run: Path) -> None:
    runs = (tiny_run, job(sweep, 0.28, 1))
    assert metrics(runs[0]) == metrics(runs[1])
    texts = [(run / "samples.jsonl").read_text() for run in runs]
    assert texts[0] == texts[1]


def test_sweep_ends_with_a_comparison(sweep: Path) -> None:
    content = json.loads((sweep / "result.json").read_text())
    assert [each["values"] for each in content["settings"]] == [
        {"ppo.kl_ctl": 0.28},
        {"ppo.kl_ctl": 0.5},
    ]
    gold = content["settings"][1]["measures"]["gold"]
    golds = [result_of(job(sweep, 0.5, s))["phases"]["ppo"]["gold_after"] for s in (1, 2)]
    assert gold["mean"] == pytest.approx(sum(golds) / 2)
    assert gold["runs"] == 2
    assert yaml.safe_load((sweep / "multirun.yaml").read_text()) == content
    said = (sweep.parents[2] / "stdout").read_text()
    assert "   2  2 of 2 runs  ppo.kl_ctl=0.5" in said
    first = said.splitlines().index(next(n for n in said.splitlines() if n.strip()[:4] == "gold"))
    row, other = said.splitlines()[first : first + 2]
    assert re.fullmatch(r"gold +1 +0\.\d{3}", row.strip())
    assert re.fullmatch(r"2 +0\.\d{3} +[+-]0\.\d{3} +two seeds", other.strip())
    assert "Fewer than three seeds tell nothing" in said


def test_terminal_gets_two_lines_of_each_job_and_a_file_its_screen(sweep: Path) -> None:
    said = (sweep.parents[2] / "stdout").read_text()
    assert len(said.splitlines()) < 45, "of four jobs, with the table"
    name = "ppo.kl_ctl=0.5,seed=1"
    (began, ended) = [line for line in said.splitlines() if line.startswith(f"{name}: ")]
    assert began.endswith(f"; its screen is in {sweep.resolve() / name}/output.log")
    assert re.search(r"objective 0\.\d{3} after 0:0\d:\d\d", ended)
    assert "What to type next" not in said
    screen = (sweep / name / "output.log").read_text()
    assert screen.index("plan: ") < screen.index("What to type next")


def test_same_command_repeats_nothing_that_finished(sweep: Path) -> None:
    cwd = sweep.parents[2]
    times = {path: path.stat().st_mtime_ns for path in sweep.rglob("*/result.json")}
    lost = job(sweep, 0.5, 1)
    kept = metrics(lost)
    (lost / "result.json").unlink()
    (lost / "ppo" / "result.json").unlink()
    run = launch("-m", *TINY_RUN, *GRID, cwd=cwd, RLHF_CACHE=cwd / "cache")
    assert run.returncode == 0, run.stderr
    again = {path for path, time in times.items() if path.stat().st_mtime_ns != time}
    assert again == {lost / "result.json", lost / "ppo" / "result.json"}
    assert metrics(lost) == kept


JOB = """
import os, pathlib, time
from rlhf.jobs.sweep_jobs import end_with_parent
end_with_parent()
pathlib.Path("pids").write_text(f"{os.getpid()} {os.getppid()}\\n")
time.sleep(60)
"""
SWEEP = """
import os, sys
from pathlib import Path
from types import SimpleNamespace
from joblib import Parallel, delayed
from rlhf.jobs.sweep_jobs import _run_process, end_with_launcher
hardware = SimpleNamespace(ranks_per_node=1, device=None)
os.environ["RLHF_LAUNCHER"] = str(os.getpid())
jobs = int(sys.argv[1])
def job():
    end_with_launcher()
    _run_process(hardware, Path("job"), "job.py", jobs=jobs)
Parallel(n_jobs=jobs)([delayed(job)()])
"""


@pytest.mark.parametrize("jobs", [1, 2])
def test_the_job_of_a_killed_sweep_ends(jobs: int, tmp_path: Path) -> None:
    (tmp_path / "job").mkdir()
    (tmp_path / "job.py").write_text(JOB)
    with start("-c", SWEEP, jobs, cwd=tmp_path, popen=subprocess.Popen) as sweep:
        while not (tmp_path / "pids").exists() or not (tmp_path / "pids").read_text():
            assert sweep.poll() is None, sweep.communicate()
            time.sleep(0.05)
        sweep.kill()
    patience = time.monotonic() + 10
    for number in (tmp_path / "pids").read_text().split():
        process = Path("/proc", number, "stat")
        while process.exists() and process.read_text().rpartition(")")[2].split()[0] != "Z":
            assert time.monotonic() < patience, "the job or joblib's worker outlives the sweep"
            time.sleep(0.05)


def test_job_that_fails_leaves_the_others(tmp_path: Path) -> None:
    words = ["phase=sft", "sft.batch_size=16,100000", "plan=off"]  # ranks find it
    run = launch("-m", *TINY_RUN, *words, cwd=tmp_path, RLHF_CACHE=new_cache(tmp_path / "cache"))
    assert run.returncode == 2
    failed = "error: job sft.batch_size=100000 failed with exit code 2: error: "
    assert run.stderr.count(failed) == 1, "with the reason"
    assert "Traceback" not in run.stderr
    (sweep,) = (tmp_path / "runs" / "sweeps").iterdir()
    assert result_of(sweep / "sft.batch_size=16")["phases"]["sft"]["steps"] > 0
    assert f"no result: {sweep.relative_to(tmp_path) / 'sft.batch_size=100000'}" in run.stdout


def test_run_starts_from_a_finished_run(sweep: Path, tiny_run: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    own = [word for word in TINY_RUN if not word.startswith(("sft", "reward", "data", "model"))]
    words = [*own, f"from_run={tiny_run}", "ppo.kl_ctl=0.5", f"run_dir={run_dir}"]
    run = launch(*words, cwd=tmp_path)
    assert run.returncode == 0, run.stderr
    assert f"reward: taken from {tiny_run.resolve()}" in run.stdout
    assert metrics(run_dir) == metrics(job(sweep, 0.5, 1))
    plan = json.loads((run_dir / "plan.json").read_text())
    assert list(plan["phases"]) == ["ppo"], "what is taken is not planned"


def test_phases_that_the_finished_run_lacks_are_refused(tiny_run: Path, tmp_path: Path) -> None:
    run = launch(f"from_run={tiny_run}", "phase=sft", cwd=tmp_path)
    assert run.returncode == 2
    assert "the run has finished none of the phases that sft starts from" in run.stderr
    assert "Traceback" not in run.stderr


def test_store_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    cache = new_cache(tmp_path / "cache")
    (cache / "phases").write_text("a file")
    words = [*TINY_RUN, "phase=sft", "reuse.phases=always"]
    run = launch(*words, cwd=tmp_path, RLHF_CACHE=cache)
    assert run.returncode == 2
    assert "phases cannot be written (File exists); set RLHF_CACHE to a folder" in run.stderr
    assert "Traceback" not in run.stderr


def test_folder_without_a_run_cannot_be_started_from(tmp_path: Path) -> None:
    run = launch(f"from_run={tmp_path}", cwd=tmp_path)
    assert run.returncode == 2
    assert "is not the directory of a run" in run.stderr
