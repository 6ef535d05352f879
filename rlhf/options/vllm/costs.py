"""Costs of a vLLM server: the time in which its GPUs sample a rollout; the ranks only wait."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from rlhf.config.choices import Phase
from rlhf.config.roles import SHARDED_WEIGHTS
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
FILLED = 0.9  # share of a GPU that vLLM takes (--gpu-memory-utilization)


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
    """Return the seconds in which ``gpus`` GPUs, which share the weights, sample ``responses``."""
    at, config, actor = scene.at, scene.config, scene.models[0]
    size = at.bytes_per_weight(actor)
    tokens = config.rollout.max_prompt_tokens + config.token_limit_after_prompt[1]
    row = memory_model.kv_cache_bytes(actor.shape, rows=1, tokens=tokens, size=size)
    room = gpus * at.machine.memory * FILLED - actor.weights * size
    rows = min(responses, max(1, int(room / row)))
    server = replace(
        at,
        machine=replace(at.machine, ranks=1, nodes=1),
        zero=replace(at.zero, stage=min(at.zero.stage, SHARDED_WEIGHTS - 1)),
        efficiency=replace(at.efficiency, **SERVER),
    )
    # Each GPU has its share of the rows' products, and of the heads of all rows.
    how = build_sampling(scene, responses=math.ceil(responses / gpus), rows=math.ceil(rows / gpus))
    shared = replace(how, tensor_parallel=gpus, shared=config.ppo.responses_per_prompt)
    return sampling_seconds(server, actor, shared)


def describe_server_costs(config: RunConfig) -> Iterator[str]:
    """Yield a sentence on what a plan with a server includes."""
    gpus = config.rollout.server.gpus
    if gpus is None:
        yield (
            "the time does not include generation, which a vLLM server does on GPUs that no rank "
            "uses; rollout.server.gpus=N plans it on N GPUs of the ranks' kind"
        )
    else:
        yield (
            f"generation is planned on {gpus} more GPUs of the ranks' kind, for the vLLM server; "
            "the price includes them, the time of sending weights is not counted"
        )
