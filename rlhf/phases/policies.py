"""What PPO and DPO build alike: the policy that learns, its reference, and what samples from it."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from rlhf.algorithms.streams import seed_for
from rlhf.config.choices import Backend, LoraRole
from rlhf.config.schema import RunConfig
from rlhf.models.building import ModelSource, build_actor
from rlhf.phases.adapters import lora_spec
from rlhf.phases.sources import policy_source
from rlhf.rollout.hf import HfRollout
from rlhf.rollout.sampling import SamplingSettings
from rlhf.types import RolloutBackend

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

BACKENDS = {Backend.hf: HfRollout}


def learning_source(config: RunConfig, *, dropout: float) -> ModelSource:
    """The SFT model as the policy's start."""
    return replace(
        policy_source(config),
        dropout=dropout,
        gradient_checkpointing=config.model.gradient_checkpointing,
    )


def build_policy(
    config: RunConfig, tokenizer: PreTrainedTokenizerBase, *, dropout: float
) -> PreTrainedModel:
    """The policy, with adapters where they are asked for."""
    return build_actor(
        learning_source(config, dropout=dropout),
        tokenizer,
        seed=seed_for(config.seed, "model"),
        lora=lora_spec(config.lora, LoraRole.actor),
    )


def build_reference(
    config: RunConfig, tokenizer: PreTrainedTokenizerBase
) -> PreTrainedModel | None:
    """A copy of the policy as it starts; None where the policy without its adapters is that."""
    spec = lora_spec(config.lora, LoraRole.actor)
    if spec is not None and not spec.train_rest:
        return None
    return build_actor(policy_source(config), tokenizer, seed=seed_for(config.seed, "model"))


def rollout_backend(
    config: RunConfig, tokenizer: PreTrainedTokenizerBase, *, temperature: float
) -> RolloutBackend:
    """What samples responses, as ``rollout`` says, at a temperature."""
    rollout = config.rollout
    return BACKENDS[rollout.backend](
        SamplingSettings(
            max_tokens=rollout.max_response_tokens,
            temperature=temperature,
            top_k=rollout.top_k,
            top_p=rollout.top_p,
        ),
        end_id=tokenizer.eos_token_id,
        pad_id=tokenizer.pad_token_id,
    )
