"""Rules for the config groups ``model`` and ``reward_model``."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from rlhf.base.errors import ConfigError, refuse_first
from rlhf.config.choices import ModelInit, Phase, Source
from rlhf.config.roles import SHARDED_WEIGHTS, has_reward_model, starting_models
from rlhf.config.schema.model import ModelConfig
from rlhf.config.schema.run import RunConfig

# Beginnings of the names of sizes in transformers' configurations.
COUNTS = ("hidden_size", "intermediate_size", "num_attention", "num_hidden", "num_key", "head_dim")


def check_models(config: RunConfig) -> None:
    """Check that each phase can get its models, and that PPO and DPO start from trained ones."""
    order, model, reward_model = config.phase.order, config.model, config.reward_model
    if model.init.starts_from_sft:
        raise ConfigError(
            f"model.init={model.init}: only reward_model.init can be {model.init}; "
            "use model.init=pretrained or model.init=random"
        )
    for phase in (Phase.ppo, Phase.dpo):
        if phase in order and Phase.sft not in order and model.init is not ModelInit.pretrained:
            raise ConfigError(
                f"model.init={model.init}: {phase.upper()} starts from an SFT model; "
                "add model.init=pretrained model.path=FOLDER, or run the sft phase too"
            )
    if reward_model.init is ModelInit.gold and not config.rewards:
        check_gold_judge(config)
    elif has_reward_model(config) and (
        Phase.ppo in order
        and Phase.reward not in order
        and reward_model.init is not ModelInit.pretrained
    ):
        raise ConfigError(
            f"reward_model.init={reward_model.init}: PPO needs a trained reward model; "
            "add reward_model.init=pretrained reward_model.path=FOLDER, run the reward phase too, "
            "use model@reward_model=gold, the judge of data=synthetic, or rewards (docs/rewards.md)"
        )
    for phase in order:
        for key, used in starting_models(config, phase):
            check_model(key, used)
    zero = config.zero
    if SHARDED_WEIGHTS in (zero.stage, zero.critic_stage, zero.reference_stage, zero.reward_stage):
        refuse_compile(config, "zero.stage=3, which gathers weights in each layer")


def refuse_compile(config: RunConfig, setting: str) -> None:
    """Raise ConfigError if the run compiles a model whose layers ``setting`` changes."""
    for phase in config.phase.order:
        for key, model in starting_models(config, phase):
            if model.compile:
                raise ConfigError(f"{key}.compile=true with {setting}: use only one of the two")


def check_gold_judge(config: RunConfig) -> None:
    """Check that the synthetic task's judge (init=gold) can replace the reward model here."""
    broken = {
        f"data.source={config.data.source}: the judge scores the prompts of the generated task "
        "only; use data=synthetic, or train a reward model with model@reward_model=sft_model": (
            config.data.source is not Source.synthetic
        ),
        "the reward phase: a judge is not trained; use phase=pipeline_rule (SFT, then PPO), or "
        "phase=ppo with model.path=FOLDER": Phase.reward in config.phase.order,
    }
    refuse_first(broken, "reward_model.init=gold with ")


def check_model(key: str, model: ModelConfig) -> None:
    """Check that ``model``, the value of the key ``key``, can be built or loaded."""
    if model.init is ModelInit.pretrained and not model.path:
        raise ConfigError(
            f"{key}.path={'null' if model.path is None else ''}: {key}.init=pretrained needs a "
            f"path; add {key}.path=FOLDER_OR_HUB_ID, or {key}.init=random to train from scratch"
        )
    if model.init is ModelInit.random and "model_type" not in model.architecture:
        raise ConfigError(
            f"{key}.architecture has no model_type: {key}.init=random builds the model from "
            f"the architecture; choose an option of the group {key} with a "
            "model_type, see python launch.py --help"
        )
    for name, value in model.architecture.items():
        is_number = isinstance(value, int | float)
        if is_number and name.startswith(COUNTS) and (value < 1 or value != int(value)):
            raise ConfigError(
                f"{key}.architecture.{name}={value}: must be a whole number of 1 or more"
            )
    if model.init is ModelInit.random and not model.tokenizer and not model.vocab_size:
        raise ConfigError(
            f"{key}.vocab_size=0: must be above 0 to train a tokenizer; "
            f"use {key}.vocab_size=NUMBER, or {key}.tokenizer=FOLDER_OR_HUB_ID"
        )


def check_sequence_lengths(
    config: RunConfig, fields_of: Callable[[str, ModelConfig], Mapping[str, Any]] | None = None
) -> None:
    """Check that no sequence is longer than the models allow that the phases start from.

    ``fields_of`` returns the fields of a model's config, given its key and value; without it only
    the models are checked that this run builds.
    """
    key_after, after = config.tokens_after_prompt
    tokens = {
        Phase.dpo: ("dpo.max_tokens", config.dpo.max_tokens),
        Phase.sft: ("sft.max_tokens", config.sft.max_tokens),
        Phase.reward: ("reward.max_tokens", config.reward.max_tokens),
        Phase.ppo: (
            f"rollout.max_prompt_tokens + {key_after}",
            config.rollout.max_prompt_tokens + after,
        ),
    }
    for phase in config.phase.order:
        name, wanted = tokens[phase]
        for key, model in starting_models(config, phase):
            is_random = model.init is ModelInit.random
            fields = fields_of(key, model) if fields_of else model.architecture if is_random else {}
            limit = fields.get("max_position_embeddings", fields.get("n_positions", math.inf))
            if not isinstance(limit, int | float):
                raise ConfigError(
                    f"{key}.architecture.max_position_embeddings={limit}: must be a whole number"
                )
            if wanted > limit:
                place = f"{key}.architecture." if is_random else f"{key}.path={model.path}, "
                raise ConfigError(
                    f"{name}={wanted}: the model has {limit} positions "
                    f"({place}max_position_embeddings); use {limit} or less, "
                    "or a model with more positions"
                )
