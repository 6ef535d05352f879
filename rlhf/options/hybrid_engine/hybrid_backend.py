"""The backend ``rollout.backend=hybrid_engine``: DeepSpeed's kernels on the actor's own weights."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlhf.base.errors import CapabilityError, ConfigError
from rlhf.config.batches import rollout_plan
from rlhf.config.choices import Phase
from rlhf.config.schema.run import RunConfig
from rlhf.engine.deepspeed_engine import op_unavailable_reason
from rlhf.engine.devices import TORCH_DTYPES
from rlhf.options.hybrid_engine.hybrid_rollout import (
    HybridEngineRollout,
    HybridSettings,
    hybrid_engine_unavailable_reason,
)
from rlhf.options.hybrid_engine.supported_models import model_unsupported_reason
from rlhf.phases.shared.backends import BackendParts

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


def require_hybrid_engine(config: RunConfig, model: PreTrainedConfig | None) -> None:
    """Check that the Hybrid Engine can sample here, and from this ``model``.

    Raises:
        CapabilityError: if it cannot; the message has the reason and an alternative.
        ConfigError: if the run has a DPO phase.
    """
    if Phase.dpo in config.phase.order:
        raise ConfigError(
            "rollout.backend=hybrid_engine with the dpo phase: only PPO's actor has the "
            "Hybrid Engine; use rollout=fast"
        )
    if config.lora.rank and "actor" in config.lora.roles:
        # Not in rules.py: plan=only must accept DeepSpeed-Chat's recipes with the engine and LoRA.
        raise CapabilityError(
            f"rollout.backend=hybrid_engine with lora.rank={config.lora.rank} on the actor: "
            "the Hybrid Engine's layers read only the base weights and would "
            "generate without the adapters; use rollout=fast, which merges adapters for each "
            "rollout, or lora=none"
        )
    tensor_parallel = config.rollout.hybrid_engine.inference_tp_size
    obstacle = hybrid_engine_unavailable_reason(tensor_parallel=tensor_parallel)
    obstacle = obstacle or op_unavailable_reason("InferenceBuilder")
    if obstacle is None and model is not None and (reason := model_unsupported_reason(model)):
        obstacle = f"a model of model_type={model.model_type} {reason}"
    if obstacle is not None:
        raise CapabilityError(f"rollout.backend=hybrid_engine: {obstacle}; use rollout=fast")


def build_hybrid_backend(config: RunConfig, parts: BackendParts) -> HybridEngineRollout:
    """Return the backend that samples with the Hybrid Engine of the actor."""
    rollout = config.rollout
    settings = HybridSettings(
        dtype=TORCH_DTYPES[parts.dtype],
        max_rows=rollout.max_rows or rollout_plan(config).per_rank,
        max_prompt_tokens=rollout.max_prompt_tokens,
        cuda_graphs=rollout.hybrid_engine.enable_cuda_graph,
    )
    return HybridEngineRollout(parts.settings, settings, pad_id=parts.pad_id, stop=parts.stop)
