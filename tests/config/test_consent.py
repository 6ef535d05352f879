"""Code that a run directory names runs only if the command itself says so."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
from omegaconf import DictConfig

from rlhf import export, replay
from rlhf.base.errors import ConfigError
from rlhf.chat import __main__ as chat
from rlhf.config.choices import Phase
from rlhf.config.consent import keys_that_run_code
from rlhf.config.freeze import load_run, to_run_config
from rlhf.evaluate import __main__ as evaluate
from rlhf.jobs.completion import copy_keys_of_source_run
from tests.chat.small_run import save_run
from tests.conftest import Compose
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
