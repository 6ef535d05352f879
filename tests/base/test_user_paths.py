"""Paths that users name: ``~`` is their home, and what cannot be a path is refused by its key."""

import os
import re
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import pytest
from omegaconf import OmegaConf

import rlhf.chat.__main__
import rlhf.compare.__main__
import rlhf.evaluate.__main__
import rlhf.export
import rlhf.report.__main__
from rlhf.base.cpu import cache_folder
from rlhf.base.errors import ConfigError
from rlhf.base.user_paths import expand_user_path, read_user_text
from rlhf.config.choices import ModelInit, RewardKind
from rlhf.config.freeze import load_run, to_run_config
from rlhf.config.run_dir import make_run_dir
from rlhf.config.schema.rewards import RewardTerm
from rlhf.config.schema.run import RunConfig
from rlhf.jobs.completion import build_new_config, read_stopped_config
from rlhf.jobs.launch_command import Job
from rlhf.models.build import ModelSource
from rlhf.models.shapes import shape_of
from rlhf.models.tokenizers import load_or_train_tokenizer
from rlhf.plan.steps import total_examples
from rlhf.rewards.rules import build_json_rule
from rlhf.runtime.launch_mode import check_hostfile
from tests.conftest import Compose

NOBODY = "~nobody_here/x"
LONG = "x" * 300


def test_the_home_folder_is_put_in(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert expand_user_path("~/a", key="data.path") == tmp_path / "a"
    assert expand_user_path("org/name", key="model.path") == Path("org/name")
    assert (
        expand_user_path(tmp_path / "file" / "below", key="run_dir") == tmp_path / "file" / "below"
    )


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        (NOBODY, "there is no home folder ~nobody_here here; write the whole path"),
        (LONG, "not a usable path (File name too long"),
        ("", "must name a file or folder"),
        (" ", "must name a file or folder"),
        ("a\0b", "not a usable path (embedded null byte)"),
        ("a\ud800", "not a usable path ('utf-8' codec can't encode"),
        ("loop", "not a usable path (Too many levels of symbolic links"),
    ],
)
def test_what_cannot_be_a_path_is_refused(
    name: str, reason: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("loop").symlink_to("loop")
    with pytest.raises(ConfigError, match="^" + re.escape(f"run_dir={name}: {reason}")):
        expand_user_path(name, key="run_dir")


def test_only_regular_files_are_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path, Path("/dev/zero")):
        with pytest.raises(OSError, match="not a regular file"):
            read_user_text(path)
    with pytest.raises(FileNotFoundError):
        read_user_text(tmp_path / "missing")


@pytest.fixture
def config(compose: Compose) -> RunConfig:
    return to_run_config(compose([]))


@pytest.mark.parametrize("path", [NOBODY, LONG])
def test_every_key_refuses_it(
    path: str, config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RLHF_CACHE", path)
    model = replace(config.model, init=ModelInit.pretrained, path=path)
    own_tokenizer = replace(config.model, tokenizer=path)
    hosts = replace(config, launcher=replace(config.launcher, hostfile=path))
    by_name = OmegaConf.create({"from_run": path})
    acts: dict[str, Callable[[], object]] = {
        "run_dir": lambda: make_run_dir(
            replace(config, run_dir=path), job_dir=None, now=datetime(2026, 1, 1)
        ),
        "resume": lambda: read_stopped_config(Job(by_name, [], resume=path)),
        "from_run": lambda: build_new_config(Job(by_name, [])),
        "RLHF_CACHE": cache_folder,
        "data.path": lambda: total_examples(replace(config.data, size=0, path=path)),
        "launcher.hostfile": lambda: check_hostfile(hosts),
        "model.path": lambda: ModelSource.from_config(model, key="model"),
        "reward_model.path": lambda: shape_of(model, key="reward_model"),
        "model.tokenizer": lambda: load_or_train_tokenizer(own_tokenizer, key="model", texts=[]),
        "json_schema": lambda: build_json_rule(RewardTerm(kind=RewardKind.json, json_schema=path)),
    }
    for key, act in acts.items():
        with pytest.raises(ConfigError, match=re.escape(f"{key}={path}: ")):
            act()
    with pytest.raises(ConfigError, match=re.escape(f"run_dir={path}: ")):
        load_run(path)


@pytest.mark.parametrize("path", [NOBODY, LONG])
def test_every_command_refuses_it(path: str, capsys: pytest.CaptureFixture[str]) -> None:
    run, against = [path], [".", "--against", path]
    for key, main, words in (
        ("RUN_DIR", rlhf.report.__main__.main, run),
        ("RUN_DIR", rlhf.export.main, run),
        ("RUN_DIR", rlhf.evaluate.__main__.main, run),
        ("RUN_DIR", rlhf.chat.__main__.main, run),
        ("RUN_DIR", rlhf.compare.__main__.main, run),
        ("--against", rlhf.evaluate.__main__.main, against),
        ("--against", rlhf.compare.__main__.main, against),
        ("--out", rlhf.export.main, [".", "--out", path]),
        ("--answers", rlhf.compare.__main__.main, ["--answers", path]),
    ):
        assert main(words) == 2
        assert f"error: {key}={path}: " in capsys.readouterr().err


def test_files_of_keys_are_regular_files(config: RunConfig, tmp_path: Path) -> None:
    pipe = str(tmp_path / "pipe")
    os.mkfifo(pipe)
    hosts = replace(config, launcher=replace(config.launcher, hostfile=pipe))
    with pytest.raises(ConfigError, match=f"hostfile={pipe} .*not a regular file"):
        check_hostfile(hosts)
    with pytest.raises(ConfigError, match=f"json_schema={pipe}: .*not a regular file"):
        build_json_rule(RewardTerm(kind=RewardKind.json, json_schema=pipe))
