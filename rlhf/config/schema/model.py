"""Schema of the config groups ``model``, ``reward_model`` and ``lora``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rlhf.config.choices import ModelInit
from rlhf.config.schema.keys import (
    ABOVE_0,
    AT_LEAST_0,
    FROM_0_BELOW_1,
    NO_PHASE,
    AtResume,
    Unread,
    key,
)

RANDOM = Unread(
    lambda model: model.init is ModelInit.random,
    "{group}.init=random makes the model from {group}.architecture",
    "use {option}=pretrained {group}.path={value}",
)
PRETRAINED = Unread(
    lambda model: model.init is ModelInit.pretrained,
    "{group}.init=pretrained loads the model that {group}.path names",
    "remove {group}.architecture, or use {option}=tiny",
)
SFT_MODEL = Unread(
    lambda model: model.init.starts_from_sft,
    "{group}.init=sft and gold start from the SFT model of the same run",
    "use {option}=pretrained {group}.path={value}",
)


@dataclass(kw_only=True)
class LearningRates:
    """Peak learning rates that suit one model, by training phase or role."""

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
    """One model: its weights, or the architecture to build it from."""

    init: ModelInit
    """pretrained: load path; random: build architecture. For reward_model also sft: the run's SFT
    model, and gold: no reward model, but the judge of the synthetic task."""
    path: str | None = key(unread=[RANDOM, SFT_MODEL])
    """Hugging Face model folder or hub id; null if init is not pretrained."""
    revision: str | None = key(unread=[RANDOM, SFT_MODEL])
    """Hub revision of path; null: the newest."""
    tokenizer: str | None = key(unread=[SFT_MODEL])
    """Tokenizer folder or hub id; null: as in path, or trained on the run's text if init=random."""
    end_token: str | None = key(unread=[SFT_MODEL])
    """Token that training teaches as the end, added if it is new; null: the tokenizer's own. Tokens
    of generation_config.json end responses too."""
    vocab_size: int = key(AT_LEAST_0, unread=[SFT_MODEL])
    """Maximum vocabulary size of a tokenizer trained on the run's text; 0: none is trained."""
    architecture: dict[str, Any] = key(unread=[PRETRAINED, SFT_MODEL])
    """Fields of the Hugging Face config, with model_type; used if init=random."""
    dropout: float = key(FROM_0_BELOW_1)
    """Dropout probability: of model in the sft phase, of reward_model in the reward phase."""
    learning_rates: LearningRates = key(affects=NO_PHASE, at_resume=AtResume.fixed)
    """Peak learning rates that suit the model; defaults of sft.lr, ppo.actor_lr and so on."""
    gradient_checkpointing: bool | int = key(AT_LEAST_0)
    """Recompute activations in the backward pass: slower, less memory; N: in the first N layers."""
    compile: bool = key(at_resume=AtResume.rounding, unread=[SFT_MODEL])
    """Compile the layers with torch.compile: a slow start, then faster passes; not at stage 3."""
    attention: str | None = key(unread=[SFT_MODEL])
    """matmul (this project's; sdpa on a GPU), eager, sdpa or flash_attention_2; null: matmul."""
    trust_remote_code: bool = key(unread=[SFT_MODEL])
    """Run Python code from the model's repository; enable only for code that you have read."""
