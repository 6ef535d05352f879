"""What can be said of the rollouts before any model is built, so that no phase runs in vain."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlhf.config.choices import Backend, LoraRole, ModelInit, Phase
from rlhf.config.schema import ModelConfig, RunConfig
from rlhf.errors import CapabilityError, ConfigError
from rlhf.rollout.decoders.families import FAMILIES
from rlhf.rollout.decoders.general import decoding_obstacle
from rlhf.rollout.hybrid_engine import machine_obstacle
from rlhf.rollout.hybrid_models import model_obstacle

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


def require_rollouts(config: RunConfig) -> None:
    """Refuse a rollout backend that this machine, these versions or the model rule out.

    Raises:
        CapabilityError: with the reason, and a backend that would do.
        ConfigError: rollout.backend=hybrid_engine with the DPO phase, whose policy has none.
    """
    if not {Phase.ppo, Phase.dpo} & set(config.phase.order):
        return
    model = _config_of(config.model)
    if config.rollout.backend is Backend.hybrid_engine:
        if Phase.dpo in config.phase.order:
            raise ConfigError(
                "rollout.backend=hybrid_engine with the dpo phase: only PPO's actor has that "
                "engine, and DPO answers a few prompts; use rollout=fast"
            )
        if config.lora.rank and LoraRole.actor in config.lora.roles:
            # Plans of DeepSpeed-Chat's recipes, which have both, compose.
            raise CapabilityError(
                f"rollout.backend=hybrid_engine with lora.rank={config.lora.rank} on the actor: "
                "its layers read the weights below the adapters and would answer without what is "
                "learned; use rollout=fast, which merges adapters for each rollout, or lora=none"
            )
        tensor_parallel = config.rollout.hybrid_engine.inference_tp_size
        obstacle = machine_obstacle(tensor_parallel=tensor_parallel)
        if obstacle is None and model is not None:
            obstacle = _of_model(model, model_obstacle(model))
        if obstacle is not None:
            raise CapabilityError(f"rollout.backend=hybrid_engine: {obstacle}; use rollout=fast")
    if config.rollout.backend is Backend.fast and model is not None:
        obstacle = _of_model(model, _decoding_obstacle(model))
        if obstacle is not None:
            raise CapabilityError(f"rollout.backend=fast: {obstacle}; use rollout=hf")


def _of_model(config: PreTrainedConfig, obstacle: str | None) -> str | None:
    if obstacle is None:
        return None
    return f"a model of model_type={config.model_type} {obstacle}"


def _decoding_obstacle(config: PreTrainedConfig) -> str | None:
    """Why no decoder fits; None too where only the built model, or the prompts, can say it.

    Those are the decoder of a model that has an encoder too, and windows shorter than sequences.
    """
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    model = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if model is None or config.model_type in FAMILIES or config.is_encoder_decoder:
        return None
    return decoding_obstacle(model, config, tokens=0)


def _config_of(model: ModelConfig) -> PreTrainedConfig | None:
    """The config of the model that answers; None where only building it can say what is wrong."""
    from transformers import AutoConfig

    try:
        if model.init is ModelInit.random:
            return AutoConfig.for_model(**model.architecture)
        return AutoConfig.from_pretrained(
            model.path, revision=model.revision, trust_remote_code=model.trust_remote_code
        )
    except (KeyError, OSError, TypeError, ValueError):
        return None
