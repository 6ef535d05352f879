"""What a run directory names, code or other things, is used only if the command itself says so."""

from __future__ import annotations

import io
import json
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_type_hints

import pytest
import yaml
from omegaconf import DictConfig

from rlhf import export, replay
from rlhf.base.errors import ConfigError
from rlhf.base.packaged_yaml import read_yaml_beside
from rlhf.chat import __main__ as chat
from rlhf.config.choices import Phase
from rlhf.config.consent import OUTSIDE, keys_that_need_consent, keys_that_run_code
from rlhf.config.freeze import load_run
from rlhf.config.hydra_errors import schema_types
from rlhf.config.schema.data import DatasetConfig
from rlhf.config.schema.rewards import RewardTerm
from rlhf.config.typed import to_run_config
from rlhf.evaluate import __main__ as evaluate
from rlhf.jobs.completion import complete_config, copy_keys_of_source_run
from rlhf.jobs.launch_command import Job
from rlhf.methods import patterns_of_places
from tests.chat.small_run import save_run
from tests.conftest import Compose
from tests.needs_lab import needs_lab
from tests.runs import EPISODES

Main = Callable[[Sequence[str]], int]
RULE = ["phase=pipeline_rule", "+rewards.environment={kind: environment}"]
EVIL = [
    *("environment=custom", "environment.target=evil:E", "environment.run_code=true"),
    "+rewards.mine={kind: function, function: 'evil:f', run_code: true}",
    "model.trust_remote_code=true",
]


@pytest.fixture
def hostile(tmp_path: Path, compose: Compose, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run whose models, environment and reward are code that leaves the file ``ran``."""
    run_dir = save_run(
        tmp_path / "run", lambda words: compose([*words, *EPISODES[:3], *RULE, *EVIL])
    )
    source = f"from pathlib import Path\nPath({str(tmp_path / 'ran')!r}).touch()\n"
    (tmp_path / "evil.py").write_text(source)
    evil = {"model_type": "evil", "auto_map": {"AutoConfig": "e.C", "AutoModelForCausalLM": "e.M"}}
    for place in ("ppo/actor", "sft/model", "ppo/state/step-00000001"):
        (run_dir / place).mkdir(parents=True, exist_ok=True)
        (run_dir / place / "e.py").write_text(source)
        (run_dir / place / "config.json").write_text(json.dumps(evil))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "stdin", io.StringIO("hi\n"))
    return run_dir


COMMANDS: dict[str, tuple[Main, list[str]]] = {
    "chat": (chat.main, []),
    "an episode": (chat.main, ["--environment"]),
    "evaluate": (evaluate.main, []),
    "replay": (replay.main, ["--phase", "ppo"]),
    "export of a checkpoint": (export.main, ["--checkpoint", "1"]),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_code_of_a_run_does_not_run(
    name: str,
    hostile: Path,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    main, words = COMMANDS[name]
    found = SimpleNamespace(folder=hostile / "ppo/state/step-00000001")
    monkeypatch.setattr(export, "load_checkpoint", lambda _: found)
    if name == "an episode":  # its models are harmless
        path = hostile / "config.yaml"
        path.write_text(path.read_text().replace("trust_remote_code: true", ""))
    assert main([str(hostile), *words]) == 2
    assert "then add --trust-run" in capsys.readouterr().err
    assert not (tmp_path / "ran").exists()


def test_the_command_may_trust_the_code(hostile: Path, tmp_path: Path) -> None:
    chat.main([str(hostile), "--trust-run"])
    assert (tmp_path / "ran").exists()


def test_a_run_without_code_needs_no_consent(tmp_path: Path, compose: Compose) -> None:
    assert keys_that_run_code(save_run(tmp_path / "run", compose)) == []


def test_from_run_takes_no_consent(hostile: Path, compose: Compose) -> None:
    words = ["model.trust_remote_code=true", "environment.run_code=true"]
    for count in (0, 1):
        with pytest.raises(ConfigError, match=f"then add {' '.join(words[count:])}$"):
            take(compose, hostile, [*RULE, *words[:count]])
    config = to_run_config(take(compose, hostile, [*RULE, *words]))
    assert config.model.trust_remote_code
    assert config.environment.target == load_run(hostile).environment.target


def take(compose: Compose, source: Path, words: list[str]) -> DictConfig:
    cfg = compose(words)
    copy_keys_of_source_run(cfg, source, [Phase.sft], words)
    return cfg


REACHING = read_yaml_beside(__file__, "keys_that_need_consent.yaml")


def edit_config(run_dir: Path, change: dict[str, Any]) -> None:
    """Change keys of the stored configuration, as somebody else would."""
    path = run_dir / "config.yaml"
    config = yaml.safe_load(path.read_text())
    for group, values in change.items():
        config[group] = config[group] | values
    path.write_text(yaml.safe_dump(config))


@needs_lab
def test_what_a_run_of_others_names_outside_needs_consent(
    tmp_path: Path, compose: Compose, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlhf.config.freeze.remember", lambda _: None)
    run_dir = save_run(tmp_path / "run", compose)
    kept = (run_dir / "config.yaml").read_text()
    assert keys_that_need_consent(run_dir) == []
    for key, change in REACHING.items():
        edit_config(run_dir, change)
        assert keys_that_need_consent(run_dir) == [key]
        assert keys_that_need_consent(run_dir, models_only=True) == []
        (run_dir / "config.yaml").write_text(kept)
    (run_dir / "config.yaml").write_text(f"{kept}# from elsewhere\n")
    (run_dir / "inputs.json").write_text("{}")
    (run_dir / "command.txt").write_text("python launch.py 'name=${oc.env:HOME}'\n")
    (run_dir / "sft/model/adapter_config.json").write_text("{}")
    adapter = "sft/model/adapter_config.json"
    assert keys_that_need_consent(run_dir) == [adapter, "inputs.json", "command.txt"]
    assert keys_that_need_consent(run_dir, models_only=True) == [adapter]


def test_ones_own_run_needs_no_consent(tmp_path: Path, compose: Compose) -> None:
    words = ["data=local", "data.path=mine.jsonl", "model.tokenizer=someone/model"]
    run_dir = save_run(tmp_path / "run", lambda more: compose([*more, *words]))
    assert keys_that_need_consent(run_dir) == []
    moved = run_dir.rename(tmp_path / "moved")
    assert keys_that_need_consent(moved) == []
    with (moved / "config.yaml").open("a") as file:
        file.write("# changed by somebody\n")
    assert sorted(keys_that_need_consent(moved)) == ["data.path", "model.tokenizer"]


# Texts of a configuration that name nothing outside of the run.
INSIDE = r"""name|experiment|run_dir|resume|from_run|checkpoint\..+|hardware\.name|
    .+\.(subset|revision|train_split|eval_split|columns|end_token|architecture|attention|extra)|
    reward\.(margin_column|score_columns)|ppo\.teacher_prompt_column|rollout\.stop|data\.ptx_.+|tracking\.(project|tags)|
    lora\.target_modules|environment\.options|rewards\.NAME\.(pattern|model|token|label)"""
# Code that a command names, beside the key that agrees to run it.
NAMED_CODE = r"environment\.target|rewards\.NAME\.(function|sealed|files)"


def test_every_text_of_a_configuration_is_known_to_be_inside_or_needs_consent() -> None:
    kinds = {**schema_types()}
    for group, schema in {"rewards": RewardTerm, "data.sets": DatasetConfig}.items():
        kinds |= {f"{group}.NAME.{name}": kind for name, kind in get_type_hints(schema).items()}
        del kinds[group]
    texts = [key for key, kind in kinds.items() if re.search(r"\bstr\b|Any", str(kind))]
    known = "|".join([re.sub(r"\s+", "", INSIDE), NAMED_CODE, OUTSIDE, *patterns_of_places()])
    assert [key for key in texts if not re.fullmatch(known, key)] == []


HTTP = {"kind": "http", "weight": 1.0, "url": "http://127.0.0.1:9", "token_variable": "HOME"}
WITH_TOKEN = {"rewards": {"m": {"kind": "model"}, "h": HTTP}}


@pytest.mark.parametrize("name", ["an episode", "evaluate", "replay", "resume", "from_run"])
def test_no_command_sends_a_variable_that_a_run_names(
    name: str,
    tmp_path: Path,
    compose: Compose,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("it connects")

    monkeypatch.setattr("socket.create_connection", refuse)
    run_dir = save_run(tmp_path / "run", compose)
    edit_config(run_dir, WITH_TOKEN)
    fix = "--trust-run"
    if name in COMMANDS:
        main, words = COMMANDS[name]
        assert main([str(run_dir), *words]) == 2
        said = capsys.readouterr().err
    else:
        fix, words = "trust_run=true", [f"{name}={run_dir}"]
        resume = str(run_dir) if name == "resume" else None
        with pytest.raises(ConfigError) as caught:
            complete_config(Job(compose(words), words, resume=resume))
        said = str(caught.value)
    assert "(rewards.h.token_variable, rewards.h.url), which need your consent" in said
    assert f"then add {fix}" in said


def test_the_command_may_trust_a_run_that_it_resumes(tmp_path: Path, compose: Compose) -> None:
    run_dir = save_run(tmp_path / "run", compose)
    edit_config(run_dir, WITH_TOKEN)
    words = [f"resume={run_dir}", "trust_run=true", "plan=off"]
    with pytest.raises(ConfigError, match=r"rewards\.h\.url=.*: nothing answers there"):
        complete_config(Job(compose(words), words, resume=str(run_dir)))
