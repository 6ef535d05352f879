"""Sweeps and runs that start from others: what is shared is trained once, and changes nothing."""

import json
import re
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from tests.runs import ROOT, TINY_RUN, launch, metrics, new_cache, start

pytestmark = pytest.mark.slow

# The last pair and the first seed: TINY_RUN.
PAIRS = "zip:\n  ppo.kl_ctl: [0.5, 0.28]\n  ppo.cliprange: [0.1, 0.2]\nseeds: 2\nminutes: 600\n"
NAMES = [
    f"ppo.cliprange={c},ppo.kl_ctl={k},seed={s}"
    for c, k in ((0.1, 0.5), (0.2, 0.28))
    for s in (1, 2)
]


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("sweeps") / "pairs.yaml"
    path.write_text(PAIRS)
    return path


def words_of(file: Path, *words: str) -> list[str]:
    return ["-m", *TINY_RUN, "plan=check", f"sweep={file.with_suffix('')}", *words]


@pytest.fixture(scope="module")
def sweep(file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished sweep of two pairs by two seeds."""
    cwd = tmp_path_factory.mktemp("sweep")
    run = launch(*words_of(file), cwd=cwd, RLHF_CACHE=new_cache(cwd / "cache"))
    assert run.returncode == 0, run.stderr
    (cwd / "stdout").write_text(run.stdout)
    (folder,) = (cwd / "runs" / "sweeps").iterdir()
    return folder


def result_of(run_dir: Path) -> dict[str, Any]:
    return json.loads((run_dir / "result.json").read_text())


def job(sweep: Path, kl_ctl: float, seed: int) -> Path:
    return sweep / f"ppo.cliprange={0.1 if kl_ctl == 0.5 else 0.2},ppo.kl_ctl={kl_ctl},seed={seed}"


def test_jobs_are_runs_named_by_what_differs(sweep: Path) -> None:
    for kl_ctl in (0.5, 0.28):
        runs = [metrics(job(sweep, kl_ctl, seed)) for seed in (1, 2)]
        assert all(lines[-2]["ppo/kl_ctl"] == kl_ctl for lines in runs)
        assert runs[0][0] != runs[1][0], "another seed has other metrics"
    assert re.search("_pairs-[0-9a-f]{8}$", sweep.name), (
        "named by the file, and a hash of the command"
    )


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
        {"ppo.cliprange": 0.1, "ppo.kl_ctl": 0.5},
        {"ppo.cliprange": 0.2, "ppo.kl_ctl": 0.28},
    ]
    gold = content["settings"][0]["measures"]["gold"]
    golds = [result_of(job(sweep, 0.5, s))["phases"]["ppo"]["gold_after"] for s in (1, 2)]
    assert gold["mean"] == pytest.approx(sum(golds) / 2)
    assert gold["runs"] == 2
    assert content["tried"]["places"] == [str(sweep.parents[1].resolve())]
    assert content["tried"]["settings"] == 2
    said = (sweep.parents[2] / "stdout").read_text()
    assert "   1  2 of 2 runs  ppo.kl_ctl=0.5 ppo.cliprange=0.1" in said
    first = said.splitlines().index(next(n for n in said.splitlines() if n.strip()[:4] == "gold"))
    row, other = said.splitlines()[first : first + 2]
    assert re.fullmatch(r"gold +1 +0\.\d{3}", row.strip())
    assert re.fullmatch(r"2 +0\.\d{3} +[+-]0\.\d{3} +two seeds", other.strip())
    assert "Fewer than three seeds show no difference" in said


def test_terminal_gets_two_lines_of_each_job_and_a_file_its_screen(sweep: Path) -> None:
    said = (sweep.parents[2] / "stdout").read_text()
    assert len(said.splitlines()) < 45, "of four jobs, with the table"
    assert re.match(r"minutes=600: 0\.00 minutes spent, 0\.\d\d planned for 4 jobs\n", said)
    name = job(sweep, 0.5, 1).name
    (began, ended) = [line for line in said.splitlines() if line.startswith(f"{name}: ")]
    assert began.endswith(f"; its output is in {sweep.resolve() / name}/output.log")
    assert re.search(r"objective 0\.\d{3} after 0:0\d:\d\d", ended)
    assert "What to type next" not in said
    screen = (sweep / name / "output.log").read_text()
    assert screen.index("plan: ") < screen.index("What to type next")


def compared(sweep: Path, said: str) -> tuple[Any, ...]:
    """All that a sweep ends with, apart from times and from who trained shared phases."""
    content = result_of(sweep)
    for setting in content["settings"]:
        del setting["measures"]["minutes"]
    found = {name: result_of(sweep / name)["phases"] for name in NAMES}
    for measures in (each for phases in found.values() for each in phases.values()):
        for name in ("seconds", "measured", "planned", "reused_from", "peak_memory_gib"):
            measures.pop(name, None)
    lines = [line.rstrip() for line in said.splitlines()]
    first, last = (
        n for n, line in enumerate(lines) if line.lstrip().startswith(("Settings", "minutes "))
    )
    return content["settings"], found, lines[first:last], [metrics(sweep / name) for name in NAMES]


def test_a_killed_sweep_with_pairs_seeds_and_a_cap_ends_like_the_undisturbed_one(
    sweep: Path, file: Path, tmp_path: Path
) -> None:
    cache, folder = sweep.parents[2] / "cache", tmp_path / "runs" / "sweeps" / sweep.name
    for kl_ctl, seed in ((0.5, 1), (0.28, 1), (0.5, 2)):  # all but the last have finished
        name = job(sweep, kl_ctl, seed).name
        shutil.copytree(sweep / name, folder / name)
    with start(ROOT / "launch.py", *words_of(file), cwd=tmp_path, RLHF_CACHE=cache) as process:
        while sum('"ppo"' in each.read_text() for each in folder.glob("*/metrics.jsonl")) < 4:
            assert process.poll() is None, process.communicate()
            time.sleep(0.02)
        process.kill()
    done = {path: path.stat().st_mtime_ns for path in folder.glob("*/result.json")}
    assert len(done) == 3
    ended = launch(*words_of(file), cwd=tmp_path, RLHF_CACHE=cache)
    assert ended.returncode == 0, ended.stderr
    undisturbed = (sweep.parents[2] / "stdout").read_text()
    assert compared(folder, ended.stdout) == compared(sweep, undisturbed)
    assert [path.stat().st_mtime_ns for path in done] == [*done.values()], "not repeated"


JOB = """
import os, pathlib, sys, time
from rlhf.jobs.sweep_jobs import end_with_parent
end_with_parent()
pathlib.Path("words").write_text(" ".join(sys.argv[1:]))
pathlib.Path("pids").write_text(f"{os.getpid()} {os.getppid()}\\n")
time.sleep(60)
"""
SWEEP = """
import os
from pathlib import Path
from types import SimpleNamespace
from joblib import Parallel, delayed
from rlhf.jobs.sweep_jobs import SweepCap, _run_process, end_with_launcher
hardware = SimpleNamespace(ranks_per_node=1, device=None)
cap = SweepCap(Path("spent"), 9.0, "minutes=9")
os.environ["RLHF_LAUNCHER"] = str(os.getpid())
jobs = 2
def job():
    end_with_launcher()
    _run_process(hardware, Path("job"), "job.py", cap, jobs=jobs)
Parallel(n_jobs=jobs)([delayed(job)()])
"""


def test_the_job_of_a_killed_sweep_ends(tmp_path: Path) -> None:
    (tmp_path / "job").mkdir()
    (tmp_path / "job.py").write_text(JOB)
    with start("-c", SWEEP, cwd=tmp_path, popen=subprocess.Popen) as sweep:
        while not (tmp_path / "pids").exists() or not (tmp_path / "pids").read_text():
            assert sweep.poll() is None, sweep.communicate()
            time.sleep(0.05)
        sweep.kill()
    told = "what the sweep composed needs no consent, even if its cache cannot be written"
    assert (tmp_path / "words").read_text() == "resume=job trust_run=true", told
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
    words = [*own, "plan=check", f"from_run={tiny_run}", "ppo.kl_ctl=0.5", "ppo.cliprange=0.1"]
    run = launch(*words, f"run_dir={run_dir}", cwd=tmp_path)
    assert run.returncode == 0, run.stderr
    assert f"reward: taken from {tiny_run.resolve()}" in run.stdout
    assert metrics(run_dir) == metrics(job(sweep, 0.5, 1))
    plan = json.loads((run_dir / "plan.json").read_text())
    assert list(plan["phases"]) == ["ppo"], "what is taken is not planned"


def test_store_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    cache = new_cache(tmp_path / "cache")
    (cache / "phases").write_text("a file")
    words = [*TINY_RUN, "phase=sft", "reuse.phases=always"]
    run = launch(*words, cwd=tmp_path, RLHF_CACHE=cache)
    assert run.returncode == 2
    assert "phases cannot be written (File exists); set RLHF_CACHE to a folder" in run.stderr
    assert "Traceback" not in run.stderr
