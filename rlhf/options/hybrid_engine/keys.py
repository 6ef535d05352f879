"""Keys of DeepSpeed's Hybrid Engine."""

from __future__ import annotations

from dataclasses import dataclass

from rlhf.config.schema.keys import ABOVE_0, key, needs


@dataclass(kw_only=True)
class HybridEngineConfig:
    """Settings of DeepSpeed's Hybrid Engine, for backend=hybrid_engine (docs/rollouts.md)."""

    max_out_tokens: int | None = key(ABOVE_0)
    """Tokens per sequence in the KV cache; null: max_prompt_tokens + max_response_tokens."""
    inference_tp_size: int = key(ABOVE_0)
    """Ranks that share one copy of the weights during generation; above 1 requires stage 3."""
    release_inference_cache: bool
    """Free the KV cache after each rollout: slower, less memory."""
    pin_parameters: bool
    """Stage 3: gather all layers for a whole rollout; false: gather each layer when it runs."""
    tp_gather_partition_size: int = key(ABOVE_0)
    """Layers that are gathered together at stage 3, with inference_tp_size above 1."""
    enable_cuda_graph: bool
    """Run decode steps as CUDA graphs; not at stage 3."""


@dataclass(kw_only=True)
class HybridEngineKeys:
    """Keys of the group ``rollout`` for DeepSpeed's Hybrid Engine."""

    hybrid_engine: HybridEngineConfig = key(unread=[needs("rollout.backend", "hybrid_engine")])
    """Options of backend=hybrid_engine."""
