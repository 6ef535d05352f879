"""A resumed run reads the data that it began with; a preset's size is not a user's file's."""

import json
import re
from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from pathlib import Path

import pytest

from rlhf.base.errors import ConfigError, DataError
from rlhf.base.stored_files import INPUTS
from rlhf.config.choices import RewardKind
from rlhf.config.freeze import (
    apply_resume_overrides,
    load_frozen_config,
    read_command,
    write_command,
)
from rlhf.config.hydra_errors import schema_types
from rlhf.config.schema.data import DatasetConfig
from rlhf.config.schema.keys import Names, store_whole_paths
from rlhf.config.schema.rewards import RewardTerm
from rlhf.config.schema.run import RunConfig
from rlhf.jobs.completion import CompletedConfig, StoppedRun, build_new_config
from rlhf.jobs.input_files import check_input_hashes, write_input_hashes
from rlhf.jobs.job import begin_run
from rlhf.jobs.launch_command import Job, field_docstrings
from tests.plan.planned import Compose, run_of

WORDS = ["experiment=smoke", "data=local", "data.path=mine.jsonl", "hardware.dtype=fp32"]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with data and code, in which a command is typed."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.jsonl").write_text(row("chosen"))
    (tmp_path / "val").mkdir()
    (tmp_path / "val" / "a.jsonl").write_text(row("held out"))
    (tmp_path / "val" / "notes.md").write_text("not read")
    (tmp_path / "groups.json").write_text("{}")
    (tmp_path / "brief.py").write_text("def score(prompts, responses): ...")
    return tmp_path


def row(answer: str) -> str:
    return json.dumps({"prompt": "Say it", "chosen": answer, "rejected": "no"})


def with_everything(compose: Compose) -> RunConfig:
    return run_of(
        compose,
        *WORDS,
        "data.eval_path=val",
        "reward.groups_path=groups.json",
        "+rewards.model={kind: model}",
        "+rewards.mine={kind: function, function: 'brief:score', run_code: true}",
    )


def test_inputs_are_whole_paths_with_hashes(compose: Compose, folder: Path) -> None:
    config = with_everything(compose)
    write_input_hashes(config, folder)
    stored = json.loads((folder / INPUTS).read_text())
    assert {key: list(files) for key, files in stored.items()} == {
        "data.path": [str(folder / "mine.jsonl")],
        "data.eval_path": [str(folder / "val" / "a.jsonl")],
        "reward.groups_path": [str(folder / "groups.json")],
        "rewards.mine.function": [str(folder / "brief.py")],
    }
    check_input_hashes(config, folder)


@pytest.mark.parametrize(
    ("key", "change"),
    [
        ("data.path", lambda folder: (folder / "mine.jsonl").write_text(row("other"))),
        ("data.path", lambda folder: (folder / "mine.jsonl").unlink()),
        ("data.eval_path", lambda folder: (folder / "val" / "b.jsonl").write_text("{}")),
        ("reward.groups_path", lambda folder: (folder / "groups.json").write_text('{"a": 1}')),
    ],
)
def test_a_changed_file_is_named_when_a_run_is_resumed(
    compose: Compose, folder: Path, key: str, change: Callable[[Path], object]
) -> None:
    config = with_everything(compose)
    write_input_hashes(config, folder)
    change(folder)
    with pytest.raises(DataError, match=rf"^{key}: .*json.* changed since the run of .* began"):
        begin_run(CompletedConfig(config, StoppedRun(folder, config)), Job(compose([]), []))


def test_another_file_under_the_same_name_is_refused(
    compose: Compose, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = run_of(compose, *WORDS)
    write_input_hashes(config, folder)
    (folder / "elsewhere").mkdir()
    (folder / "elsewhere" / "mine.jsonl").write_text(row("chosen"))
    monkeypatch.chdir(folder / "elsewhere")
    with pytest.raises(DataError, match="resume in the folder in which the run began"):
        check_input_hashes(config, folder)


def test_a_run_resumes_in_any_folder(
    compose: Compose, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It stores whole paths; the words that began it still mean the same in its own folder."""
    (folder / "1").mkdir()
    (folder / "1" / "a.jsonl").write_text(row("chosen"))
    (folder / "latest").symlink_to("1")
    typed = [*WORDS[:2], "data.path=[latest/a.jsonl,mine.jsonl]", "data.eval_path=null", *WORDS[3:]]
    typed += ["reward.groups_path=groups.json", "data.cache_dir=1", "run_dir=run", "plan=off"]
    begin_run(CompletedConfig(run_of(compose, *typed)), Job(compose(typed), typed))
    stored = load_frozen_config(folder / "run")
    assert stored.data.path == [str(folder / "1" / "a.jsonl"), str(folder / "mine.jsonl")]
    assert stored.reward.groups_path == str(folder / "groups.json")
    assert stored.data.cache_dir == str(folder / "1")
    part = RewardTerm(kind=RewardKind.json, json_schema="groups.json")
    (part,) = store_whole_paths(replace(stored, rewards={"json": part})).rewards.values()
    assert part.json_schema == str(folder / "groups.json")
    assert store_whole_paths(apply_resume_overrides(stored, compose(typed), typed)) == stored
    monkeypatch.chdir(folder / "val")
    check_input_hashes(stored, folder / "run")
    with pytest.raises(ConfigError, match="which resume cannot change"):
        apply_resume_overrides(stored, compose(typed), typed)


def test_a_command_names_the_run_that_a_link_stood_for(folder: Path) -> None:
    (folder / "runs" / "1").mkdir(parents=True)
    (folder / "runs" / "latest").symlink_to("1")
    words = ["seed=2", "from_run=runs/latest", "data.path=./mine.jsonl", "model.path=a/b", "x="]
    made = ["++data.sets={a: {path: b}}", "++ppo.gamma=1"]  # the first is typed without ++
    write_command([*words, *made], folder)
    typed = ["data.sets={a: {path: b}}", "++ppo.gamma=1"]
    assert read_command(folder) == [words[0], "from_run=runs/1", *words[2:], *typed]


def test_each_key_that_names_a_file_is_stored_as_a_whole_path() -> None:
    """Except names of files in a folder that another key names, or that the run itself makes."""
    schemas = {RunConfig, DatasetConfig, RewardTerm}
    schemas |= {kind for kind in schema_types().values() if is_dataclass(kind)}
    others = {"run_dir", "resume", "from_run", "files", "export", "upload", "tensorboard", "sealed"}
    for schema in schemas:
        for field in fields(schema):
            text = field_docstrings(schema).get(field.name, "")
            says = re.search(r"\b([Ff]iles?|[Ff]older)\b(?! RUN_DIR)", text.partition(";")[0])
            names = says and field.type not in ("bool", "Source") and field.name not in others
            assert bool(names) <= (field.metadata.get("names") is Names.place), (
                f"{schema} {field.name}"
            )


def test_changed_code_is_said(
    compose: Compose, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = with_everything(compose)
    write_input_hashes(config, folder)
    (folder / "brief.py").write_text("def score(prompts, responses): return [0.0]")
    check_input_hashes(config, folder)
    assert "rewards.mine.function: " in capsys.readouterr().err


def test_a_size_of_an_experiment_does_not_stand_for_a_file(compose: Compose, folder: Path) -> None:
    typed = [*WORDS, "data.size=70"]
    assert build_new_config(Job(compose(typed), typed)).data.size == 70
    assert build_new_config(Job(compose(WORDS), WORDS)).data.size == 0
    made = ["experiment=smoke"]
    assert build_new_config(Job(compose(made), made)).data.size > 0
