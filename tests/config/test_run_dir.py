"""Where a run's directory is, and what runs/latest points to."""

import errno
import fcntl
import os
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from rlhf.base.errors import CheckpointError, ConfigError
from rlhf.config import run_dir as run_dir_module
from rlhf.config.freeze import keep_reduced_sizes, write_frozen_config
from rlhf.config.run_dir import (
    clear_untrained_run,
    lock_run_dir,
    make_run_dir,
    point_latest_to,
)
from rlhf.config.schema.run import RunConfig
from rlhf.config.typed import to_run_config
from tests.conftest import Compose

pytestmark = pytest.mark.slow

NOW = datetime(2026, 11, 21, 7, 8, 9)
STAMP = "2026-11-21_07-08-09"

MakeConfig = Callable[..., RunConfig]


@pytest.fixture(autouse=True)
def _in_tmp_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def config(compose: Compose) -> MakeConfig:
    """A configuration with overrides."""
    return lambda *overrides: to_run_config(compose(list(overrides)))


def test_directory_has_the_name_the_time_and_a_number(config: MakeConfig) -> None:
    made = [make_run_dir(config("name=mine"), job_dir=None, now=NOW) for _ in range(3)]
    assert made == [Path("runs/mine") / (STAMP + number) for number in ("", "-2", "-3")]
    assert made[0].is_dir()
    assert not os.path.lexists("runs/latest"), "a start that may be refused is not the latest run"
    point_latest_to(made[1], print)
    assert os.readlink("runs/latest") == f"mine/{STAMP}-2"


@pytest.mark.parametrize(
    ("asked", "made", "link"),
    [
        ("deep/er", "deep/er", None),
        ("runs/mine", "runs/mine", "mine"),
        ("'~/mine'", "home/mine", None),
    ],
)
def test_an_explicit_directory_is_taken_and_linked_if_in_runs(
    asked: str, made: str, link: str | None, config: MakeConfig, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for _ in range(2):  # an existing folder without a run is taken too, here that of a plan
        found = make_run_dir(config(f"run_dir={asked}"), job_dir=tmp_path, now=NOW)
        (found / "plan.json").write_text("{}")
        assert found.resolve() == tmp_path / made
    assert found.is_dir()
    point_latest_to(found, print)
    latest = Path("runs/latest")
    assert (os.readlink(latest) if latest.is_symlink() else None) == link


def test_job_of_a_sweep_that_starts_again_keeps_its_run(config: MakeConfig, tmp_path: Path) -> None:
    job_dir = tmp_path / "runs" / "sweeps" / "now" / "0"
    for _ in range(2):
        assert make_run_dir(config(), job_dir=job_dir, now=NOW) == job_dir
        write_frozen_config(config(), job_dir)
    with pytest.raises(ConfigError, match="already holds a run"):
        make_run_dir(config("seed=2"), job_dir=job_dir, now=NOW)


def test_a_command_that_is_started_again_finds_its_run(config: MakeConfig) -> None:
    """As on a cloud: the same command with run_dir and resume=auto, begun and continued."""
    asked = config("run_dir=mine")
    first = make_run_dir(asked, job_dir=None, now=NOW, continues=True)
    write_frozen_config(asked, first)
    assert make_run_dir(asked, job_dir=None, now=NOW, continues=True) == first == Path("mine")
    for words, continues in ((["seed=2"], True), ([], False)):
        with pytest.raises(ConfigError, match=r"run_dir=mine already holds a run: .* resume=mine"):
            make_run_dir(config("run_dir=mine", *words), job_dir=None, now=NOW, continues=continues)


def test_a_start_that_trained_nothing_leaves_its_folder_to_the_next(config: MakeConfig) -> None:
    """As after a refused reward function, or a reward model with other tokens."""
    run_dir, asked = Path("mine"), config("run_dir=mine")
    (run_dir / "tokenizer").mkdir(parents=True)
    for name in ("attempts.json", "plan.json", "metrics.jsonl", "notes of the user"):
        (run_dir / name).touch()
    write_frozen_config(config("seed=2"), run_dir)
    assert make_run_dir(asked, job_dir=None, now=NOW) == run_dir
    (run_dir / "metrics.jsonl").write_text("{}\n")
    clear_untrained_run(run_dir)
    assert (run_dir / "config.yaml").exists(), "it has logged"
    for trained in (True, False):
        with pytest.raises(ConfigError, match="already holds a run"):
            make_run_dir(asked, job_dir=None, now=NOW)
        (run_dir / "metrics.jsonl").write_text("" if trained else "{}\n")
        (run_dir / "sft").mkdir() if trained else (run_dir / "sft").rmdir()
    (run_dir / "metrics.jsonl").write_text("")
    clear_untrained_run(run_dir)
    left = {path.name for path in run_dir.iterdir()}
    assert left == {"metrics.jsonl", "notes of the user"}, "no tokenizer of another model"


def test_directory_that_cannot_be_made_or_written_is_refused(
    config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("runs").write_text("a file")
    refusal = r"runs/.* cannot be created \(Not a directory\).* run_dir="
    for overrides in (["run_dir=runs/a/b"], []):
        with pytest.raises(ConfigError, match=refusal):
            make_run_dir(config(*overrides), job_dir=None, now=NOW)
    monkeypatch.setattr(os, "access", lambda *_: False)  # root may write everywhere
    with pytest.raises(ConfigError, match=r"mine is not writable: choose another .* run_dir="):
        make_run_dir(config("run_dir=mine"), job_dir=None, now=NOW)


def test_folder_in_place_of_the_link_is_kept(config: MakeConfig) -> None:
    Path("runs/latest/precious").mkdir(parents=True)
    with pytest.raises(ConfigError, match=r"runs/latest is a folder: .* move the folder away"):
        make_run_dir(config(), job_dir=None, now=NOW)
    assert Path("runs/latest/precious").is_dir()
    assert sorted(path.name for path in Path("runs").iterdir()) == ["default", "latest"]


@pytest.mark.parametrize(
    ("changed", "is_found"),
    [
        (["ppo.micro_batch_size=2", "rollout.max_rows=4"], True),  # on_oom=reduce_micro_batch
        (["checkpoint.keep=7", "tracking.log_every=3"], True),
        (["ppo.kl_ctl=0.9"], False),
        (["seed=5"], False),
    ],
)
def test_a_run_with_reduced_sizes_is_found_again(
    changed: list[str], is_found: bool, config: MakeConfig, tmp_path: Path
) -> None:
    asked, stored = config("ppo.micro_batch_size=8"), config("ppo.micro_batch_size=8", *changed)
    first = make_run_dir(asked, job_dir=None, now=NOW)
    job = make_run_dir(asked, job_dir=tmp_path / "job", now=NOW)
    for run_dir in (first, job):
        write_frozen_config(stored, run_dir)
    again = make_run_dir(asked, job_dir=None, now=NOW, continues=True)
    assert (again.resolve() == first.resolve()) is is_found
    if is_found:
        assert make_run_dir(asked, job_dir=job, now=NOW) == job
        sizes = keep_reduced_sizes(stored, asked)
        assert sizes.ppo.micro_batch_size == stored.ppo.micro_batch_size
        assert sizes.rollout.max_rows == stored.rollout.max_rows
        assert sizes.checkpoint.keep == asked.checkpoint.keep
        nodes = replace(asked, hardware=replace(asked.hardware, nodes=2))
        assert keep_reduced_sizes(stored, nodes) == nodes, "other ranks divide in another way"


def test_resume_auto_passes_over_a_run_of_another_version(
    config: MakeConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    old = make_run_dir(config("name=mine"), job_dir=None, now=NOW)
    (old / "config.yaml").write_text("seed: 1\na_key_of_old: 2\n")
    run_dir = make_run_dir(config("name=mine"), job_dir=None, now=NOW, continues=True)
    assert run_dir == Path(f"runs/mine/{STAMP}-2")
    assert f"resume=auto: {old} is not continued: " in capsys.readouterr().err


def test_a_second_process_is_refused_and_the_next_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_dir_module, "WAIT_SECONDS", 0.0)
    said: list[str] = []
    holder = os.fork()
    if holder == 0:
        with lock_run_dir(tmp_path, said.append):
            (tmp_path / "holds").touch()
            time.sleep(60)
    try:
        while not (tmp_path / "holds").exists():
            time.sleep(0.01)
        running = rf"{tmp_path}: process {holder} on .* is running this run"
        with pytest.raises(CheckpointError, match=running), lock_run_dir(tmp_path, said.append):
            pytest.fail("two processes in one run")
    finally:
        os.kill(holder, signal.SIGKILL)
        os.waitpid(holder, 0)
    with lock_run_dir(tmp_path, said.append):
        assert (tmp_path / "run.lock").read_text().startswith(f"process {os.getpid()} on ")
    assert said == []


def test_a_lock_is_waited_for(tmp_path: Path) -> None:
    said: list[str] = []

    def hold() -> None:
        with lock_run_dir(tmp_path, said.append):
            pass

    with ThreadPoolExecutor() as pool:
        with lock_run_dir(tmp_path, said.append):
            waiting = pool.submit(hold)
            while not said:
                time.sleep(0.01)
        waiting.result()
    (line,) = said
    assert "waiting until process" in line


def test_a_file_system_without_locks_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", refuse)
    said: list[str] = []
    with lock_run_dir(tmp_path, said.append):
        assert "without locks (Function not implemented)" in said[0]


def test_a_lock_that_is_a_link_is_refused(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("content")
    (tmp_path / "run.lock").symlink_to(tmp_path / "precious")
    with (
        pytest.raises(CheckpointError, match=r"run\.lock is .* it is a link"),
        lock_run_dir(tmp_path),
    ):
        pass
    assert (tmp_path / "precious").read_text() == "content"
