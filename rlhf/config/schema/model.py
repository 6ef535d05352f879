"""Schema and rules of the config groups ``model`` and ``reward_model``."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rlhf.base.errors import ConfigError, refuse_broken_rule
from rlhf.config.choices import ModelInit, Phase, Source
from rlhf.config.roles import SHARDED_WEIGHTS, has_reward_model, starting_models
from rlhf.config.schema.keys import (
    ABOVE_0,
    AT_LEAST_0,
    FROM_0_BELOW_1,
    NO_PHASE,
    AtResume,
    Names,
    Unread,
    key,
    needs,
)

if TYPE_CHECKING:
    from rlhf.config.schema.run import RunConfig

# Prefixes of the fields of transformers' configs that must be positive whole numbers.
COUNTS = ("hidden_size", "intermediate_size", "num_attention", "num_hidden", "num_key", "head_dim")

PRETRAINED = needs("init", "pretrained", fix="use {option}=pretrained {group}.path={value}")
RANDOM = needs("init", "random", fix="use {option}=tiny")
IS_MODEL = needs("init", "pretrained", "random", fix="use {option}=pretrained {group}.path={value}")
NO_TOKENIZER = Unread(("tokenizer",), lambda place: place is not None, "use {key}=null")


@dataclass(kw_only=True)
class LearningRates:
    """Keys for the peak learning rates that suit one model, by training phase or role."""

    sft: float = key(ABOVE_0)
    """Peak learning rate of supervised fine-tuning."""
    reward: float = key(ABOVE_0)
    """Peak learning rate of the reward phase."""
    actor: float = key(ABOVE_0)
    """Peak learning rate of the actor in PPO."""
    critic: float = key(ABOVE_0)
    """Peak learning rate of the critic in PPO."""
    dpo: float = key(ABOVE_0)
    """Peak learning rate of DPO."""


@dataclass(kw_only=True)
class ModelConfig:
    """Keys of one model: its weights, or the architecture to build it from."""

    init: ModelInit
    """pretrained: load the model at path; random: build it from architecture. For reward_model also
    sft: the run's SFT model, and gold: no reward model, but the judge of the synthetic task."""
    path: str | None = key(unread=[PRETRAINED], names=Names.place)
    """Hugging Face model folder or hub id; null if init is not pretrained."""
    revision: str | None = key(unread=[PRETRAINED])
    """Hub revision of path; null: the newest."""
    tokenizer: str | None = key(unread=[IS_MODEL], names=Names.place)
    """Tokenizer folder or hub id; null: as in path, or trained on the run's text if init=random."""
    end_token: str | None = key(unread=[IS_MODEL])
    """End-of-response token to train, added if it is new; null: the tokenizer's own. Tokens
    of generation_config.json end responses too."""
    vocab_size: int = key(AT_LEAST_0, unread=[RANDOM, NO_TOKENIZER])
    """Maximum vocabulary size of a tokenizer trained on the run's text; 0: none is trained."""
    architecture: dict[str, Any] = key(unread=[RANDOM])
    """Fields of the Hugging Face config, with model_type; used if init=random."""
    dropout: float = key(FROM_0_BELOW_1)
    """Dropout probability: of model in the sft phase, of reward_model in the reward phase."""
    learning_rates: LearningRates = key(affects=NO_PHASE, at_resume=AtResume.fixed)
    """Peak learning rates that suit the model; defaults of sft.lr, ppo.actor_lr and so on."""
    gradient_checkpointing: bool | int = key(AT_LEAST_0)
    """Recompute activations in the backward pass: slower, less memory; N: in the first N layers."""
    compile: bool = key(at_resume=AtResume.rounding, unread=[IS_MODEL])
    """Compile the layers with torch.compile: a slow start, then faster passes; not at stage 3."""
    attention: str | None = key(unread=[IS_MODEL])
    """matmul (this project's; sdpa on a GPU), eager, sdpa or flash_attention_2; null: matmul."""
    trust_remote_code: bool = key(unread=[IS_MODEL])
    """Run Python code from the model's repository; enable only for code that you have read."""


def check_models(config: RunConfig) -> None:
    """Check that each phase can get its models, and that PPO and DPO start from trained models."""
    order, model, reward_model = config.phase.order, config.model, config.reward_model
    starts = [phase.upper() for phase in order if phase in (Phase.ppo, Phase.dpo)]
    is_judge = reward_model.init is ModelInit.gold and not config.rewards
    broken = {
        f"model.init={model.init}: only reward_model.init can be {model.init}; use "
        "model.init=pretrained or model.init=random": model.init.starts_from_sft,
        f"model.init={model.init}: {''.join(starts)} starts from an SFT model; add "
        "model.init=pretrained model.path=FOLDER, or run the sft phase too": (
            bool(starts) and Phase.sft not in order and model.init is not ModelInit.pretrained
        ),
        f"reward_model.init=gold with data.source={config.data.source}: the judge scores the "
        "prompts of the generated task only; use data=synthetic, or train a reward model with "
        "model@reward_model=sft_model": is_judge and config.data.source is not Source.synthetic,
        "reward_model.init=gold with the reward phase: a judge is not trained; use "
        "phase=pipeline_rule (SFT, then PPO), or phase=ppo with model.path=FOLDER": (
            is_judge and Phase.reward in order
        ),
        f"reward_model.init={reward_model.init}: PPO needs a trained reward model; add "
        "reward_model.init=pretrained reward_model.path=FOLDER, run the reward phase too, use "
        "model@reward_model=gold, the judge of data=synthetic, or a reward of your own: "
        "'rewards.NAME={kind: function, function: \"MODULE:FUNCTION\", run_code: true}'": (
            has_reward_model(config)
            and Phase.ppo in order
            and Phase.reward not in order
            and reward_model.init is not ModelInit.pretrained
        ),
    }
    refuse_broken_rule(broken)
    for phase in order:
        for group, used in starting_models(config, phase):
            _check_model(group, used)
    zero = config.zero
    if SHARDED_WEIGHTS in (zero.stage, zero.critic_stage, zero.reference_stage, zero.reward_stage):
        refuse_compile(config, "zero.stage=3, which gathers weights in each layer")


def refuse_compile(config: RunConfig, setting: str) -> None:
    """Raise ConfigError if a model of the run has compile=true, which ``setting`` excludes."""
    for phase in config.phase.order:
        for group, model in starting_models(config, phase):
            if model.compile:
                raise ConfigError(f"{group}.compile=true with {setting}: use only one of the two")


def _check_model(key: str, model: ModelConfig) -> None:
    """Check that ``model``, the value of the key ``key``, can be built or loaded."""
    is_random = model.init is ModelInit.random
    broken = {
        f"{key}.path={'null' if model.path is None else ''}: {key}.init=pretrained needs a path; "
        f"add {key}.path=FOLDER_OR_HUB_ID, or {key}.init=random to train from scratch": (
            model.init is ModelInit.pretrained and not model.path
        ),
        f"{key}.architecture has no model_type: {key}.init=random builds the model from the "
        f"architecture; choose an option of the group {key} with a model_type, see "
        "python launch.py --help": is_random and "model_type" not in model.architecture,
        **{
            f"{key}.architecture.{name}={value}: must be a whole number of 1 or more": (
                name.startswith(COUNTS) and (value < 1 or value != int(value))
            )
            for name, value in model.architecture.items()
            if isinstance(value, int | float)
        },
        f"{key}.vocab_size=0: must be above 0 to train a tokenizer; use {key}.vocab_size=NUMBER, "
        f"or {key}.tokenizer=FOLDER_OR_HUB_ID": (
            is_random and not model.tokenizer and not model.vocab_size
        ),
    }
    refuse_broken_rule(broken)


def check_sequence_lengths(
    config: RunConfig, fields_of: Callable[[str, ModelConfig], Mapping[str, Any]] | None = None
) -> None:
    """Check that no sequence exceeds the position limit of a model that a phase starts from.

    ``fields_of`` returns the fields of a model's config, given its config group's key and value.
    Without ``fields_of``, only models that the run builds from an architecture are checked.
    """
    rest_key, rest = config.token_limit_after_prompt
    in_ppo = f"rollout.max_prompt_tokens + {rest_key}", config.rollout.max_prompt_tokens + rest
    for phase in config.phase.order:
        in_phase = f"{phase}.max_tokens", getattr(getattr(config, phase), "max_tokens", 0)
        length_key, length = in_ppo if phase is Phase.ppo else in_phase
        for group, model in starting_models(config, phase):
            is_random = model.init is ModelInit.random
            built = model.architecture if is_random else {}
            fields = fields_of(group, model) if fields_of else built
            field = next((n for n in ("max_position_embeddings", "n_positions") if n in fields), "")
            limit = fields.get(field, math.inf)
            place = f"{group}.architecture." if is_random else f"{group}.path={model.path}, "
            if not isinstance(limit, int | float):
                raise ConfigError(f"{place}{field}={limit}: must be a number")
            if length > limit:
                raise ConfigError(
                    f"{length_key}={length}: the model has {limit} positions ({place}{field}); "
                    f"use {limit} or less, or a model with more positions"
                )
