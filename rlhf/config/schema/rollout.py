"""Schema of the config group ``rollout``."""

from __future__ import annotations

from dataclasses import dataclass

from rlhf.config.choices import Backend, When
from rlhf.config.schema.keys import (
    ABOVE_0,
    ABOVE_0_TO_1,
    AT_LEAST_0,
    EVERY_PHASE,
    NO_PHASE,
    SECONDS,
    AtResume,
    key,
)


@dataclass(kw_only=True)
class HybridEngineConfig:
    """DeepSpeed's Hybrid Engine, used by backend=hybrid_engine (docs/rollouts.md)."""

    max_out_tokens: int | None = key(ABOVE_0)
    """Tokens per sequence in the KV cache; null: the maxima of prompt and response together."""
    inference_tp_size: int = key(ABOVE_0)
    """Ranks that share one copy of the weights during generation; above 1 requires stage 3."""
    release_inference_cache: bool
    """Free the KV cache after each rollout: slower, less memory."""
    pin_parameters: bool
    """Stage 3: gather all layers for a whole rollout; false: gather each layer when it runs."""
    tp_gather_partition_size: int = key(ABOVE_0)
    """Layers that are gathered together at stage 3, with inference_tp_size above 1."""
    enable_cuda_graph: bool
    """Replay decode steps as CUDA graphs; not at stage 3."""


@dataclass(kw_only=True)
class ServerConfig:
    """The server of backend=vllm_server (docs/rollouts.md)."""

    url: str
    """Address of a vLLM server of this run's own."""
    timeout_seconds: float = key(SECONDS)
    """Longest time for one answer: a response, or loading the weights."""
    weights_dir: str | None
    """Folder in which both processes see the weights; null: a temporary folder of this machine."""


@dataclass(kw_only=True)
class RolloutConfig:
    """Settings for sampling responses."""

    backend: Backend
    """fast: this project's decode loop; hf: generate; hybrid_engine: DeepSpeed; vllm_server."""
    max_prompt_tokens: int = key(ABOVE_0)
    """Maximum length of a prompt in tokens; longer prompts are skipped and counted."""
    max_response_tokens: int = key(ABOVE_0)
    """Maximum length of a response in tokens; longer responses are cut off."""
    temperature: float = key(ABOVE_0, affects=EVERY_PHASE)  # saved with each model
    """Logits are divided by this number before sampling."""
    top_k: int = key(AT_LEAST_0, affects=EVERY_PHASE)  # saved with each model
    """Sample only from the k likeliest tokens; 0: from all."""
    top_p: float = key(ABOVE_0_TO_1, affects=EVERY_PHASE)  # saved with each model
    """Sample only from the likeliest tokens that hold this share of probability; 1: from all."""
    eval_temperature: float | None = key(ABOVE_0)
    """Temperature of responses in evaluations; null: temperature."""
    min_response_tokens: int = key(AT_LEAST_0)
    """The end token cannot be sampled before this many tokens; 0: it can come first."""
    stop: list[str]
    """Texts that end a response, as the end token does; they stay in the response."""
    lag: int = key(AT_LEAST_0)
    """PPO: sample each step with the weights of this many steps earlier; 0: the current weights."""
    overlap: bool = key(at_resume=AtResume.rounding)
    """Sample in processes of its own while ranks train, which requires a lag (docs/rollouts.md)."""
    samplers: int = key(ABOVE_0, at_resume=AtResume.rounding)
    """Processes that sample if overlap=true; each needs cores, or a GPU, beside those of ranks."""
    max_rows: int | None = key(ABOVE_0, at_resume=AtResume.rounding)
    """Responses that a rank decodes at once, while others wait; null: all responses of the rank."""
    reuse_logprobs: When
    """Train on the rollout's log-probs; auto: while they agree with training. backend=fast only."""
    max_logprob_mismatch: float = key(AT_LEAST_0)
    """Largest mean difference, in nats per token, at which reuse_logprobs=auto reuses log-probs."""
    gather_weights: When
    """ZeRO-3: all-gather the weights once per rollout, not layer by layer; auto: if they fit."""
    cuda_graphs: bool
    """Replay decode steps as CUDA graphs, on a GPU with backend=fast."""
    keep_graphs: When = key(at_resume=AtResume.rounding)
    """Keep CUDA graphs, and the KV cache, between rollouts; auto: if they fit beside training."""
    hybrid_engine: HybridEngineConfig
    """Options of backend=hybrid_engine."""
    server: ServerConfig = key(affects=NO_PHASE)
    """Options of backend=vllm_server."""
