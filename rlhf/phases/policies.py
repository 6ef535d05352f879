"""What PPO and DPO build alike: the policy that learns, its reference, and what samples from it."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from rlhf.algorithms.streams import seed_for
from rlhf.config.checks import rollout_plan
from rlhf.config.choices import Backend, Dtype, LoraRole
from rlhf.config.schema import RunConfig
from rlhf.models.building import ModelSource, build_actor
from rlhf.models.lora import effective_weight
from rlhf.models.policy import Policy
from rlhf.models.sharded import Shard
from rlhf.phases.adapters import lora_spec
from rlhf.phases.sources import policy_source
from rlhf.rollout.fast import FastRollout, FastSettings
from rlhf.rollout.hf import HfRollout
from rlhf.rollout.hybrid_engine import HybridEngineRollout, HybridSettings
from rlhf.rollout.sampling import SamplingSettings
from rlhf.rollout.stopping import StopTexts
from rlhf.types import Ranks, RolloutBackend

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TORCH_DTYPES = {
    Dtype.fp32: torch.float32,
    Dtype.bf16: torch.bfloat16,
    Dtype.fp16: torch.float16,
}


def learning_source(config: RunConfig, *, dropout: float) -> ModelSource:
    """The SFT model as the policy's start."""
    return replace(
        policy_source(config),
        dropout=dropout,
        gradient_checkpointing=config.model.gradient_checkpointing,
    )


def build_policy(
    config: RunConfig,
    tokenizer: PreTrainedTokenizerBase,
    *,
    dropout: float,
    shard: Shard | None = None,
) -> Policy:
    """The policy, with adapters where they are asked for, sharded by ``shard`` as it is built."""
    return Policy(
        build_actor(
            learning_source(config, dropout=dropout),
            tokenizer,
            seed=seed_for(config.seed, "model"),
            lora=lora_spec(config.lora, LoraRole.actor),
            shard=shard,
        )
    )


def build_reference(
    config: RunConfig, tokenizer: PreTrainedTokenizerBase, *, shard: Shard | None = None
) -> Policy | None:
    """A copy of the policy as it starts; None where the policy without its adapters is that."""
    spec = lora_spec(config.lora, LoraRole.actor)
    if spec is not None and not spec.train_rest:
        return None
    seed = seed_for(config.seed, "model")
    return Policy(build_actor(policy_source(config), tokenizer, seed=seed, shard=shard))


def rollout_backend(
    config: RunConfig,
    tokenizer: PreTrainedTokenizerBase,
    *,
    temperature: float,
    dtype: Dtype,
    ranks: Ranks,
    greedy: bool = False,
) -> RolloutBackend:
    """Build what samples responses at a temperature, as ``rollout`` says; ``dtype`` is resolved.

    With ``greedy`` it takes the likeliest token each time.
    """
    rollout = config.rollout
    sampling = SamplingSettings(
        max_tokens=rollout.max_response_tokens,
        temperature=temperature,
        top_k=1 if greedy else rollout.top_k,
        top_p=rollout.top_p,
        min_tokens=rollout.min_response_tokens,
    )
    end_id, pad_id = tokenizer.eos_token_id, tokenizer.pad_token_id
    stop = StopTexts(tokenizer, rollout.stop)
    match rollout.backend:
        case Backend.hf:
            return HfRollout(sampling, end_id=end_id, pad_id=pad_id, stop=stop)
        case Backend.hybrid_engine:
            hybrid = HybridSettings(
                dtype=TORCH_DTYPES[dtype],
                max_rows=rollout.max_rows or rollout_plan(config).per_rank,
                max_prompt_tokens=rollout.max_prompt_tokens,
                cuda_graphs=rollout.hybrid_engine.enable_cuda_graph,
            )
            return HybridEngineRollout(sampling, hybrid, end_id=end_id, pad_id=pad_id, stop=stop)
        case Backend.fast:
            settings = FastSettings(
                dtype=TORCH_DTYPES[dtype],
                max_rows=rollout.max_rows,
                gather_weights=rollout.gather_weights,
                cuda_graphs=rollout.cuda_graphs,
            )
            return FastRollout(
                sampling,
                settings,
                end_id=end_id,
                pad_id=pad_id,
                stop=stop,
                weight_of=effective_weight,
                ranks=ranks,
            )
