"""A typed key that nothing reads is refused by name, with a way out."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from omegaconf import DictConfig

from rlhf.base.errors import ConfigError
from rlhf.config.effects import refuse_unread_keys
from rlhf.config.freeze import to_run_config

pytestmark = pytest.mark.slow

Compose = Callable[[list[str]], DictConfig]

SFT = "reward_model.init=sft and gold start from the SFT model of the same run"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["experiment=smoke", "model.path=/x"],
            "model.path=/x: model.init=random makes the model from model.architecture and does not "
            "read model.path; use model=pretrained model.path=/x",
        ),
        (
            ["model.revision=v1"],
            "model.revision=v1: model.init=random makes the model from model.architecture and does "
            "not read model.revision; use model=pretrained model.path=FOLDER_OR_ID",
        ),
        (
            ["model=pretrained", "model.path=/x", "+model.architecture.hidden_size=8"],
            "+model.architecture.hidden_size=8: model.init=pretrained loads the model that "
            "model.path names and does not read model.architecture.hidden_size; remove "
            "model.architecture, or use model=tiny",
        ),
        (
            ["model@reward_model=tiny", "reward_model.path=/x"],
            "reward_model.path=/x: reward_model.init=random makes the model from "
            "reward_model.architecture and does not read reward_model.path; use "
            "model@reward_model=pretrained reward_model.path=/x",
        ),
        (
            ["reward_model.path=/x"],
            f"reward_model.path=/x: {SFT} and does not read reward_model.path; use "
            "model@reward_model=pretrained reward_model.path=/x",
        ),
        (
            ["reward_model.attention=eager"],
            f"reward_model.attention=eager: {SFT} and does not read reward_model.attention; use "
            "model@reward_model=pretrained reward_model.path=FOLDER_OR_ID",
        ),
        (
            ["data.eval_path=x"],
            "data.eval_path=x: data.source=synthetic generates the examples and does not read "
            "data.eval_path; use data=local or data=hub with data.path=FILE_OR_HUB_ID",
        ),
        (
            ["lora.alpha=8"],
            "lora.alpha=8: lora.rank=0 trains without adapters and does not read lora.alpha; "
            "add lora=default",
        ),
        *(
            (
                [phase, word],
                f"{word}: only {readers} can read {word.partition('=')[0]}, and is not in phase",
            )
            for phase, word, readers in (
                ("phase=sft", "ppo.steps=3", "ppo"),
                ("phase=sft", "ppo.critic_check.every=8", "ppo"),
                ("phase=sft", "reward.members=3", "reward and ppo"),
                ("phase=sft", "rollout.server.timeout_seconds=9", "ppo and dpo"),
                ("phase=pipeline_dpo", "ppo.kl_ctl=0.4", "ppo"),
                ("phase=pipeline_dpo", "reward_model.dropout=0.1", "reward and ppo"),
                ("phase=pipeline", "dpo.beta=0.2", "dpo"),
            )
        ),
    ],
)
def test_a_key_that_nothing_reads_is_refused(
    overrides: list[str], message: str, compose: Compose
) -> None:
    with pytest.raises(ConfigError) as refused:
        refuse_unread_keys(to_run_config(compose(overrides)), overrides)
    assert str(refused.value).startswith(message)


@pytest.mark.parametrize(
    "overrides",
    [
        ["experiment=smoke", "model=pretrained", "model.path=/x", "model.revision=v1"],
        ["model=opt_125m", "model.init=random", "model.architecture.hidden_size=8"],
        ["model.path=null", "reward_model.path=null"],
        ["reward_model.dropout=0.1", "reward_model.gradient_checkpointing=true"],
        ["model@reward_model=pretrained", "reward_model.path=/x", "reward_model.attention=eager"],
        ["data=local", "data.path=a.jsonl", "data.eval_path=b.jsonl", "data.size=100"],
        ["lora=default", "lora.alpha=8"],
        ["phase=sft", "ppo=vapo", "rollout.temperature=0.7", "tracking.log_every=2"],  # a preset
        ["phase=pipeline_rule", "model@reward_model=gold", "reward_model.dropout=0.1"],
        ["phase=sft", "environment.max_failures=3", "checkpoint.keep=2"],
    ],
)
def test_a_key_that_is_read_is_taken(overrides: list[str], compose: Compose) -> None:
    refuse_unread_keys(to_run_config(compose(overrides)), overrides)
