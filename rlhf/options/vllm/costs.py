"""Costs of a vLLM server: the time in which its GPUs sample a rollout; the ranks only wait."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from rlhf.base.errors import ConfigError
from rlhf.config.choices import Phase
from rlhf.config.machine_rates import GIB
from rlhf.config.schema.run import RunConfig
from rlhf.plan import memory_model
from rlhf.plan.phase_plan import PhasePlan
from rlhf.plan.time_model import Sampling, sampling_seconds

if TYPE_CHECKING:
    from rlhf.plan.phase_memory import PhaseMemory

# Shares and latencies of a server that decodes by tensor parallelism: estimates, since none was
# timed. Products read weights at three quarters of the bandwidth, and an all-reduce of one token's
# activations within a node takes tens of microseconds.
SERVER = {"bandwidth": 0.75, "message_seconds": 30e-6}
SHARE_OF_VLLM = 0.9  # share of a GPU's memory that vLLM uses (--gpu-memory-utilization)


def plan_server_rollout(
    scene: PhaseMemory, build_sampling: Callable[..., Sampling], responses: int
) -> PhasePlan:
    """Plan a rollout of ``responses`` on the server; without server.gpus its time is unknown."""
    seconds, gpus = {}, scene.config.rollout.server.gpus
    if gpus is not None:
        seconds["generate"] = _server_seconds(scene, build_sampling, responses, gpus)
    return PhasePlan(
        phase=Phase.ppo,
        micro_batch=0,
        moments={"generation": scene.resident_bytes()},
        host=scene.offloaded_bytes,
        step_seconds=seconds,
        steps=scene.load.steps,
    )


def _server_seconds(
    scene: PhaseMemory, build_sampling: Callable[..., Sampling], responses: int, gpus: int
) -> float:
    """Return the seconds in which ``gpus`` GPUs, which share the weights, sample ``responses``.

    Raises:
        ConfigError: if the GPUs cannot hold the weights and one response.
    """
    at, config, actor = scene.at, scene.config, scene.models[0]
    size = at.bytes_per_weight(actor)
    tokens = config.rollout.max_prompt_tokens + config.token_limit_after_prompt[1]
    row_bytes = memory_model.kv_cache_bytes(actor.shape, rows=1, tokens=tokens, size=size)
    room = gpus * at.machine.memory * SHARE_OF_VLLM - actor.weights * size
    if (rows := min(responses, int(room / row_bytes))) < 1:
        raise ConfigError(
            f"rollout.server.gpus={gpus}: the policy's weights take "
            f"{actor.weights * size / GIB:.0f} GiB, and a response {row_bytes / GIB:.1f}, which "
            "these GPUs cannot hold; use more GPUs for the server, or null to omit its time"
        )
    server = replace(at.with_whole_weights(), efficiency=replace(at.efficiency, **SERVER))
    # Each GPU has its share of the rows' products, and of the heads of all rows.
    part = build_sampling(scene, responses=math.ceil(responses / gpus), rows=math.ceil(rows / gpus))
    shared = replace(part, tensor_parallel=gpus, shared=config.ppo.responses_per_prompt)
    return sampling_seconds(server, actor, shared)


def describe_server_costs(config: RunConfig) -> str:
    """Return a sentence on what a plan with a server includes."""
    if (gpus := config.rollout.server.gpus) is None:
        return (
            "the time does not include generation, which a vLLM server does on GPUs that no rank "
            "uses; rollout.server.gpus=N plans it on N GPUs of the same type"
        )
    return (
        f"generation is planned on {gpus} more GPUs of the same type as the ranks', for the vLLM "
        "server; the price includes them, but the time to send weights is not counted"
    )
