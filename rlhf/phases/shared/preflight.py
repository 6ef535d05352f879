"""Checks of rollouts and data before any model is built, so that no phase runs in vain."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

from rlhf.base.errors import CapabilityError, CheckpointError, ConfigError, DataError
from rlhf.config.batches import examples_per_step, largest_batch_sizes, phase_steps
from rlhf.config.choices import Backend, LoraRole, ModelInit, Phase
from rlhf.config.rules.ppo import check_ppo
from rlhf.config.schema.model import ModelConfig
from rlhf.config.schema.run import RunConfig
from rlhf.data.corpus import ptx_texts, reads_corpus
from rlhf.engine.deepspeed_kernels import op_unavailable_reason, require_quantizer
from rlhf.models.build import architecture_config
from rlhf.models.families import FAMILIES, UNKNOWN
from rlhf.models.pretrained import load_config
from rlhf.models.sources import ModelSource
from rlhf.phases.shared.context import RunContext
from rlhf.phases.shared.phase_data import phase_answered_by_dpo, phase_prompts, phase_tokens
from rlhf.rollout.decoders.via_cache import decoding_unsupported_reason
from rlhf.rollout.hybrid.hybrid_rollout import hybrid_engine_unavailable_reason
from rlhf.rollout.hybrid.supported_models import model_unsupported_reason
from rlhf.rollout.vllm_client import VllmClient

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


def require_support(config: RunConfig) -> None:
    """Check that this machine, the packages and the model support rollouts and quantization.

    Raises:
        CapabilityError: if they do not; the message names the reason and what works.
        ConfigError: if rollout.backend=hybrid_engine is combined with the DPO phase.
        RolloutError: if the server of rollout.backend=vllm_server cannot be used.
    """
    require_quantizer(config.zero)
    if not {Phase.ppo, Phase.dpo} & set(config.phase.order):
        return
    model = _config_of(config.model)
    if config.rollout.backend is Backend.hybrid_engine:
        if Phase.dpo in config.phase.order:
            raise ConfigError(
                "rollout.backend=hybrid_engine with the dpo phase: only PPO's actor has the "
                "Hybrid Engine; use rollout=fast"
            )
        if config.lora.rank and LoraRole.actor in config.lora.roles:
            # Checked here, so that plan=only accepts DeepSpeed-Chat's recipes, which have both.
            raise CapabilityError(
                f"rollout.backend=hybrid_engine with lora.rank={config.lora.rank} on the actor: "
                "the Hybrid Engine's layers read only the base weights and would "
                "generate without the adapters; use rollout=fast, which merges adapters for each "
                "rollout, or lora=none"
            )
        tensor_parallel = config.rollout.hybrid_engine.inference_tp_size
        obstacle = hybrid_engine_unavailable_reason(tensor_parallel=tensor_parallel)
        obstacle = obstacle or op_unavailable_reason("InferenceBuilder")
        if obstacle is None and model is not None:
            obstacle = _add_model_type(model, model_unsupported_reason(model))
        if obstacle is not None:
            raise CapabilityError(f"rollout.backend=hybrid_engine: {obstacle}; use rollout=fast")
    if config.rollout.backend is Backend.vllm_server:
        server = config.rollout.server
        ties = model is not None and model.tie_word_embeddings
        VllmClient(server.url, timeout=server.timeout_seconds).check(ties_embeddings=ties)
    if config.rollout.backend is Backend.fast and model is not None:
        obstacle = _add_model_type(model, _decoding_obstacle(model))
        if obstacle is not None:
            raise CapabilityError(f"rollout.backend=fast: {obstacle}; use rollout=hf")


def require_data(context: RunContext, phases: Iterable[Phase]) -> None:
    """Check that each phase has a batch to train on, before the first phase is trained.

    It also prints how many examples each phase uses and skips.

    Raises:
        DataError: if a phase has less than one batch, or nothing held out; or no corpus is found.
        ConfigError: if PPO's options do not suit the steps that its examples allow.
    """
    config = context.config
    for phase in phases:
        data = phase_tokens(context, phase)
        text = f"{phase}: {len(data.train)} examples to train on, {len(data.eval)} held out"
        reasons = ", ".join(f"{count} {why}" for why, count in data.left_out.items() if count)
        context.console.say(f"{text}; skipped: {reasons}" if reasons else text)
        needed = examples_per_step(config, phase)
        if len(data.train) < needed or len(data.eval) == 0:
            sizes = (
                largest_batch_sizes(config, phase, examples=len(data.train))
                if len(data.eval)
                else None
            )
            raise DataError(
                f"data: the {phase} phase has {len(data.train)} examples to train on and "
                f"{len(data.eval)} held out, but {_key_of_step(config, phase)} needs at least "
                f"{needed}, and 1. "
                f"{f'Use {sizes}, or give' if sizes else 'Give'} more data, a larger share of "
                "data.split, or higher token limits if many examples were skipped"
            )
        if (
            phase is Phase.dpo
            and len(phase_prompts(context, phase_answered_by_dpo(context)).eval) == 0
        ):
            raise DataError(
                "data: the dpo phase has no held-out prompt to answer that fits "
                f"rollout.max_prompt_tokens={config.rollout.max_prompt_tokens}; raise that limit"
            )
        if phase is Phase.ppo:
            steps = phase_steps(config, phase, examples=len(data.train))
            check_ppo(replace(config.ppo, steps=steps), lora_rank=config.lora.rank)
            if config.data.ptx_path is not None and reads_corpus(config):
                ptx_texts(config.data, seed=config.seed)


def _key_of_step(config: RunConfig, phase: Phase) -> str:
    """Return, for a message, the batch-size key of a phase with its value."""
    if phase is Phase.ppo:
        return f"ppo.rollout_batch_size={config.ppo.rollout_batch_size}"
    return f"{phase}.batch_size={examples_per_step(config, phase)}"


def _add_model_type(config: PreTrainedConfig, obstacle: str | None) -> str | None:
    if obstacle is None:
        return None
    return f"a model of model_type={config.model_type} {obstacle}"


def _decoding_obstacle(config: PreTrainedConfig) -> str | None:
    """Return why no decoder supports the model, or None.

    Also returns None if the answer requires the built model (a decoder beside an encoder) or the
    length of the sequences (attention windows).
    """
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    model = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    is_fused = FAMILIES.get(config.model_type, UNKNOWN).block is not None
    if model is None or is_fused or config.is_encoder_decoder:
        return None
    return decoding_unsupported_reason(model, config, tokens=0)


def _config_of(model: ModelConfig) -> PreTrainedConfig | None:
    """Return the policy's config; None if it cannot be loaded: the build raises the error."""
    try:
        if model.init is ModelInit.random:
            return architecture_config("model.architecture", model.architecture)
        return load_config(ModelSource.from_config(model, key="model"))
    except (CheckpointError, ConfigError):
        return None
