"""Where a run's directory is, and what runs/latest points to."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

import pytest
from omegaconf import DictConfig

from rlhf.config.freeze import freeze, to_run_config
from rlhf.config.run_dir import make_run_dir
from rlhf.config.schema.run import RunConfig
from rlhf.errors import ConfigError

pytestmark = pytest.mark.slow

NOW = datetime(2026, 11, 21, 7, 8, 9)
STAMP = "2026-11-21_07-08-09"

MakeConfig = Callable[..., RunConfig]


@pytest.fixture(autouse=True)
def _in_tmp_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def config(compose: Callable[[list[str]], DictConfig]) -> MakeConfig:
    """A configuration with overrides."""
    return lambda *overrides: to_run_config(compose(list(overrides)))


def test_directory_has_the_name_and_the_time(config: MakeConfig) -> None:
    run_dir = make_run_dir(config("name=mine"), job_dir=None, now=NOW)
    assert run_dir == Path("runs/mine") / STAMP
    assert run_dir.is_dir()
    assert os.readlink("runs/latest") == f"mine/{STAMP}"


def test_same_second_gets_a_number(config: MakeConfig) -> None:
    names = [make_run_dir(config(), job_dir=None, now=NOW).name for _ in range(3)]
    assert names == [STAMP, f"{STAMP}-2", f"{STAMP}-3"]
    assert Path("runs/latest").resolve().name == f"{STAMP}-3"


def test_job_of_a_sweep_keeps_its_directory(config: MakeConfig, tmp_path: Path) -> None:
    job_dir = tmp_path / "runs" / "sweeps" / "now" / "0"
    job_dir.mkdir(parents=True)
    assert make_run_dir(config(), job_dir=job_dir, now=NOW) == job_dir
    assert Path("runs/latest").resolve() == job_dir


def test_explicit_directory_outside_runs_has_no_link(config: MakeConfig, tmp_path: Path) -> None:
    wanted = tmp_path / "deep" / "er"
    assert make_run_dir(config(f"run_dir={wanted}"), job_dir=tmp_path, now=NOW) == wanted
    assert wanted.is_dir()
    assert not Path("runs").exists()


def test_explicit_directory_in_runs_is_linked(config: MakeConfig) -> None:
    assert make_run_dir(config("run_dir=runs/mine"), job_dir=None, now=NOW) == Path("runs/mine")
    assert os.readlink("runs/latest") == "mine"


def test_home_is_expanded(
    config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert make_run_dir(config("run_dir='~/mine'"), job_dir=None, now=NOW) == tmp_path / "mine"


def test_existing_folder_without_a_run_is_taken(config: MakeConfig) -> None:
    Path("mine").mkdir()
    assert make_run_dir(config("run_dir=mine"), job_dir=None, now=NOW) == Path("mine")


def test_directory_of_a_run_is_refused(config: MakeConfig) -> None:
    freeze(config(), make_run_dir(config("run_dir=mine"), job_dir=None, now=NOW))
    with pytest.raises(ConfigError, match=r"run_dir=mine already holds a run: .* resume=mine"):
        make_run_dir(config("run_dir=mine"), job_dir=None, now=NOW)


def test_job_that_starts_again_keeps_its_run(config: MakeConfig, tmp_path: Path) -> None:
    job_dir = make_run_dir(config(), job_dir=tmp_path / "0", now=NOW)
    freeze(config(), job_dir)
    assert make_run_dir(config(), job_dir=job_dir, now=NOW) == job_dir
    with pytest.raises(ConfigError, match="already holds a run"):
        make_run_dir(config("seed=2"), job_dir=job_dir, now=NOW)


@pytest.mark.parametrize("overrides", [["run_dir=runs/a/b"], []])
def test_directory_that_cannot_be_made_is_refused(overrides: list[str], config: MakeConfig) -> None:
    Path("runs").write_text("a file")
    with pytest.raises(
        ConfigError, match=r"runs/.* cannot be created \(Not a directory\).* run_dir="
    ):
        make_run_dir(config(*overrides), job_dir=None, now=NOW)


def test_directory_that_cannot_be_written_is_refused(
    config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda *_: False)  # root may write everywhere
    with pytest.raises(
        ConfigError, match="mine is not writable: choose another folder with run_dir="
    ):
        make_run_dir(config("run_dir=mine"), job_dir=None, now=NOW)


def test_folder_in_place_of_the_link_is_kept(config: MakeConfig) -> None:
    Path("runs/latest/precious").mkdir(parents=True)
    with pytest.raises(ConfigError, match=r"runs/latest is a folder: .* move the folder away"):
        make_run_dir(config(), job_dir=None, now=NOW)
    assert Path("runs/latest/precious").is_dir()
    assert sorted(path.name for path in Path("runs").iterdir()) == ["default", "latest"]
