"""Caps of sweeps: what jobs take is kept, jobs are stopped at the cap, and nothing begins after."""

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from hydra.conf import HydraConf
from hydra.core.utils import JobReturn
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext
from omegaconf import OmegaConf

from rlhf.base.errors import ConfigError
from rlhf.config.hydra_parts import parse_overrides
from rlhf.config.schema.hardware import HardwareConfig
from rlhf.jobs import sweep_jobs
from rlhf.jobs.sweep_jobs import SweepCap, read_cap, run_job
from rlhf.jobs.sweeper import JobSweeper, PlannedJob, combine_values
from rlhf.runs.registry import FoundRun

Capture = pytest.CaptureFixture[str]


def hardware(price: float | None) -> HardwareConfig:
    found = SimpleNamespace(ranks_per_node=1, nodes=2, device=None, price_per_hour=price)
    return cast("HardwareConfig", found)


JOBS = ("a1", "b1", "a2", "b2")
# A job that ends at once with a result, or else waits until it is asked to stop, while another job
# of the sweep takes 99 minutes.
JOB = """
import json, pathlib, signal, sys, time
folder = pathlib.Path(sys.argv[1].partition("=")[2])
def stop(*_):
    (folder / "stopped").touch()
    sys.exit(130)
signal.signal(signal.SIGTERM, stop)
if (folder / "quick").exists():
    (folder / "result.json").write_text(json.dumps({"objective": 0.5}))
    sys.exit(0)
other = folder.parent / ".spent" / "other.json"
other.parent.mkdir(exist_ok=True)
other.with_suffix(".new").write_text("99")
other.with_suffix(".new").rename(other)
time.sleep(60)
"""


def split(*words: str, paired: list[list[str]]) -> list[str]:
    return [" ".join(job) for job in combine_values(parse_overrides(words), paired)]


def test_all_combinations_but_pairs_by_place() -> None:
    assert split("a=1,2", "s=3", "b=x,y", paired=[]) == [
        *("a=1 s=3 b=x", "a=1 s=3 b=y", "a=2 s=3 b=x", "a=2 s=3 b=y")
    ]
    words = ("a=1,2", "seed=range(1,3)", "b='x,1',y", "c=7,8", "d=5,6")
    assert split(*words, paired=[["b", "a"], ["c", "d"]]) == [
        "a=1 b='x,1' seed=1 c=7 d=5",
        "a=1 b='x,1' seed=1 c=8 d=6",
        "a=1 b='x,1' seed=2 c=7 d=5",
        "a=1 b='x,1' seed=2 c=8 d=6",
        "a=2 b=y seed=1 c=7 d=5",
        "a=2 b=y seed=1 c=8 d=6",
        "a=2 b=y seed=2 c=7 d=5",
        "a=2 b=y seed=2 c=8 d=6",
    ]


def test_minutes_add_up_and_dollars_are_minutes_by_price(tmp_path: Path) -> None:
    def cap(jobs: int = 1, price: float | None = 6.0, **limits: float) -> SweepCap:
        sweeper = OmegaConf.create({"minutes": math.inf, "dollars": math.inf} | limits)
        hydra = cast("HydraConf", SimpleNamespace(sweeper=sweeper, sweep=SWEEP))
        return read_cap(hydra, hardware(price), jobs)

    SWEEP = SimpleNamespace(dir=str(tmp_path))
    assert cap(minutes=3) == SweepCap(tmp_path, 3, "minutes=3")
    assert cap().minutes == math.inf
    assert cap(dollars=0.5) == SweepCap(tmp_path, pytest.approx(2.5), "dollars=0.5"), "two nodes"
    assert cap(jobs=4, dollars=0.5).minutes == pytest.approx(10), "four share the nodes"
    assert cap(dollars=0.5, minutes=2).word == "minutes=2"
    with pytest.raises(
        ConfigError, match=r"^dollars=5: needs hardware\.price_per_hour, .*; set it"
    ):
        cap(price=None, dollars=5)
    (tmp_path / ".spent").mkdir()
    for name, minutes in (("a=[1],b=2", 1.25), ("a=3", 1.5)):
        cap().file(name).write_text(str(minutes))
    assert cap().spent() == 2.75
    assert cap().spent("a=[1],b=2") == 1.25
    assert cap().spent("a") == 0
    assert cap(minutes=2.76).describe_end() is None
    end = "minutes=2.75 is reached after 2.75 minutes; a larger limit continues the sweep"
    assert cap(minutes=2.75).describe_end() == end


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(sweep_jobs, "POLL_SECONDS", 0.05)
    (tmp_path / "job.py").write_text(JOB)
    (tmp_path / "a=1").mkdir()
    return tmp_path / "a=1"


def run(job: Path, minutes: float) -> float | None:
    cap = SweepCap(job.parent, minutes, f"minutes={minutes:g}")
    return run_job(hardware(None), job, str(job.parent / "job.py"), cap, jobs=1)


def test_a_job_is_stopped_at_the_cap_and_the_next_does_not_begin(
    job: Path, capsys: Capture
) -> None:
    (job.parent / ".spent").mkdir()
    (job.parent / ".spent" / "a=1.json").write_text("2")
    assert run(job, 90) is None
    assert (job / "stopped").exists(), "by the signal at which runs write a checkpoint"
    line = r"stopped: minutes=90 is reached after 101\.\d\d minutes; a larger limit continues .*"
    assert re.search(f"a=1: {line}$", " ".join(capsys.readouterr().out.split()))
    assert re.fullmatch(line, FoundRun(job).reason)
    assert 2 < float((job.parent / ".spent" / "a=1.json").read_text()) < 3, "of all its processes"
    (other := job.with_name("a=2")).mkdir()
    assert run(other, 90) is None
    assert run(job, 90) is None
    assert "its output is in" not in capsys.readouterr().out, "no process was started"


def test_a_larger_cap_continues(job: Path) -> None:
    (job / "quick").touch()
    (job.parent / ".spent").mkdir()
    (job.parent / ".spent" / "b.json").write_text("5")
    assert run(job, 5) is None
    assert run(job, 6) == 0.5
    assert run(job, 5) == 0.5, "a finished job has its objective"


def begin(
    folder: Path, *words: str, minutes: float = math.inf, run: Callable[[], object] = list
) -> list[str]:
    """Split the words into jobs, and check them, as a sweep in the folder does; then call run."""
    overrides = parse_overrides(words)
    fixed = [each.key_or_group for each in overrides if not each.is_sweep_override()]
    sweeper = JobSweeper([], minutes, math.inf)
    job = {"config": {"override_dirname": {"exclude_keys": fixed}}}
    sweeper.config = OmegaConf.create({"hydra": {"sweep": {"dir": str(folder)}, "job": job}})
    loader = SimpleNamespace(load_sweep_config=lambda **_: None)
    sweeper.hydra_context = cast("HydraContext", SimpleNamespace(config_loader=loader))
    begun: list[str] = []

    def launch(jobs: list[list[str]], **_: object) -> list[JobReturn]:
        begun.extend(" ".join(job) for job in jobs)
        run()
        return []

    sweeper.launcher = cast("Launcher", SimpleNamespace(launch=launch))
    sweeper.sweep(list(words))
    return begun


def test_jobs_are_added_to_a_sweep_by_the_same_words_only(tmp_path: Path) -> None:
    assert begin(tmp_path, "a=1,2", "b=3") == ["a=1 b=3", "a=2 b=3"]
    assert begin(tmp_path, "b=3", "a=1,2,4")[2] == "b=3 a=4"
    said = rf"^hydra\.sweep\.dir={tmp_path}: its jobs have a b=3, but this command has a b=4; "
    with pytest.raises(ConfigError, match=said + "repeat the overrides and only add values"):
        begin(tmp_path, "a=5,6", "b=4")
    assert json.loads((tmp_path / "sweep.json").read_text()) == {"words": ["a", "b=3"]}


def test_a_plan_has_shared_phases_once_and_what_is_left_of_jobs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    cap = SweepCap(tmp_path, 8.1, "minutes=8.1")
    jobs = [PlannedJob(tmp_path / name, cap, {f"sft{name[1]}": 2.0}, 1.0) for name in JOBS]
    monkeypatch.setattr("rlhf.jobs.sweeper.call_in_this_process", lambda *_: [*jobs])
    for name, minutes in (("a1", 3.0), ("b1", 0.5)):
        cap.file(name).parent.mkdir(exist_ok=True)
        cap.file(name).write_text(str(minutes))
    (tmp_path / "a1").mkdir()
    (tmp_path / "a1" / "result.json").write_text('{"objective": 1.0}')
    text = "3.50 minutes spent, 4.50 planned for 3 jobs"  # 1 - 0.5 of b1, 3 of a2, 1 of b2
    begin(tmp_path, "a=1,2", minutes=8.1)
    assert capsys.readouterr().out == f"minutes=8.1: {text}\n"
    jobs[:] = [job._replace(cap=cap._replace(minutes=8.0, word="minutes=8")) for job in jobs]
    with pytest.raises(
        ConfigError, match=rf"^minutes=8: the sweep would .* 8\.00 minutes \({text};"
    ):
        begin(tmp_path, "a=1,2", minutes=8.0)
    for job in jobs[1:]:
        job.folder.mkdir()
        (job.folder / "result.json").write_text('{"objective": 1.0}')
    begin(tmp_path, "a=1,2", minutes=8.0)  # nothing is left to do, whatever was spent


def test_a_sweep_that_its_cap_stops_has_an_exit_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cap = SweepCap(tmp_path, 4.0, "minutes=4")
    cap.file("a").parent.mkdir()
    planned = [PlannedJob(tmp_path / "b", cap, {}, 1.0)]
    monkeypatch.setattr("rlhf.jobs.sweeper.call_in_this_process", lambda *_: planned)
    begin(tmp_path, "a=1", minutes=4.0, run=lambda: cap.file("a").write_text("1.0"))
    with pytest.raises(SystemExit, match="130"):
        begin(tmp_path, "a=1", minutes=4.0, run=lambda: cap.file("a").write_text("4.0"))
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "result.json").write_text('{"objective": 1.0}')
    begin(tmp_path, "a=1", minutes=4.0)  # every job has finished
