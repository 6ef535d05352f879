"""data.template=auto becomes chat or plain by the tokenizer's files, before a run is frozen."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from huggingface_hub import constants

from rlhf.base.errors import ConfigError
from rlhf.config.choices import Template
from rlhf.config.freeze import write_frozen_config
from rlhf.config.roles import tokenizer_base
from rlhf.config.schema.run import RunConfig
from rlhf.config.typed import to_run_config
from rlhf.data.encoding import Encoder
from rlhf.data.plain_turns import build_plain_template
from rlhf.jobs.completion import (
    build_new_config,
    describe_reward_model,
    describe_template,
    read_stopped_config,
)
from rlhf.jobs.launch_command import Job
from tests.conftest import Compose
from tests.models_on_disk import small_tokenizer

CHATML = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ eos_token }}{% endfor %}"


def chosen(compose: Compose, *words: str) -> RunConfig:
    words = ("data.template=auto", *words)
    return build_new_config(Job(compose(list(words)), list(words), is_plan=True))


def described(config: RunConfig) -> list[str]:
    return describe_template(config.data.template, *tokenizer_base(config))


def saved(folder: Path, template: str | None) -> Path:
    tokenizer = small_tokenizer()
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("template", "form"),
    [
        (CHATML, Template.chat),
        (None, Template.plain),
        (build_plain_template("<s>"), Template.plain),  # the tokenizer of a run in plain turns
    ],
)
def test_a_folder_decides(
    template: str | None, form: Template, compose: Compose, tmp_path: Path
) -> None:
    config = chosen(compose, "model=pretrained", f"model.path={saved(tmp_path, template)}")
    assert config.data.template is form
    (line,) = described(config)
    assert line.startswith(f"data.template={form}: the tokenizer of {tmp_path} has ")
    assert chosen(compose, f"model.tokenizer={tmp_path}").data.template is form
    reward = ["phase=reward", "model@reward_model=pretrained", f"reward_model.path={tmp_path}"]
    assert chosen(compose, *reward).data.template is form, "the reward phase alone has one model"


OTHER = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"


@pytest.mark.parametrize(
    ("own", "theirs", "pad", "said"),
    [
        (CHATML, CHATML, 0, ""),
        (CHATML, None, 0, ""),
        (CHATML, OTHER, 0, "different chat template"),
        (None, OTHER, 0, "different chat template"),
        (CHATML, CHATML, 1, "pads with the end token"),
    ],
)
def test_what_a_reward_model_from_elsewhere_reads_otherwise_is_printed(
    own: str | None, theirs: str | None, pad: int, said: str, compose: Compose, tmp_path: Path
) -> None:
    actor, reward = (
        saved(tmp_path / name, template) for name, template in (("a", own), ("b", theirs))
    )
    (reward / "config.json").write_text(json.dumps({"pad_token_id": pad}))
    words = ["phase=ppo", "model=pretrained", "model@reward_model=pretrained"]
    words += [f"model.path={actor}", f"reward_model.path={reward}"]
    lines = describe_reward_model(chosen(compose, *words))
    assert len(lines) == bool(said)
    assert all(said in line for line in lines)
    assert not describe_reward_model(chosen(compose, *words, "phase=pipeline"))
    plain = describe_reward_model(chosen(compose, *words, "data.template=plain"))
    assert any("different chat template" in line for line in plain) == (theirs is not None)


@pytest.mark.parametrize(
    ("settings", "form"),
    [
        (json.dumps({"chat_template": CHATML}), Template.chat),
        (json.dumps({"chat_template": [{"name": "default", "template": CHATML}]}), Template.chat),
        (json.dumps({"eos_token": "</s>"}), Template.plain),
        ("{", Template.auto),  # a damaged file: the ranks report it
    ],
)
def test_the_files_in_the_cache_of_the_hub_decide(
    settings: str, form: Template, compose: Compose, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    repository = tmp_path / "models--me--chatty"
    snapshot = repository / "snapshots" / ("a" * 40)
    snapshot.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs/main").write_text("a" * 40)
    (snapshot / "tokenizer_config.json").write_text(settings)
    assert chosen(compose, "model=pretrained", "model.path=me/chatty").data.template is form


def test_an_unknown_tokenizer_is_left_to_the_ranks_and_never_guessed(compose: Compose) -> None:
    config = chosen(compose, "model=pretrained", "model.path=me/not_here")
    assert config.data.template is Template.auto
    assert "cannot be read here" in described(config)[0]
    with pytest.raises(ConfigError, match=r"set data\.template=chat or data\.template=plain"):
        Encoder(small_tokenizer(), Template.auto)


def test_a_trained_tokenizer_is_plain_without_a_word(compose: Compose) -> None:
    config = chosen(compose)
    assert (config.data.template, described(config)) == (Template.plain, [])


@pytest.mark.parametrize("name", ["data=local", "data.template=auto"])
def test_a_resumed_run_keeps_its_form(name: str, compose: Compose, tmp_path: Path) -> None:
    words = ["data=local", "data.path=pairs.jsonl"]
    config = to_run_config(compose([*words, "data.template=chat"]))
    write_frozen_config(config, tmp_path)
    cfg = compose([*words, name])
    resumed, _ = read_stopped_config(
        Job(cfg, [name, "data.path=pairs.jsonl"], resume=str(tmp_path))
    )
    assert resumed.data.template is Template.chat


@pytest.mark.parametrize(
    "name",
    [
        *("data=deepspeed_chat", "data=deepspeed_chat_benchmark", "experiment=smollm2_rule"),
        *("experiment=dsc/opt_13b", "experiment=dsc/chinese", "experiment=dsc/japanese"),
        "experiment=tables/table3",
    ],
)
def test_recipes_of_deepspeed_chat_keep_its_turns(name: str, compose: Compose) -> None:
    assert compose([name]).data.template == "plain"
