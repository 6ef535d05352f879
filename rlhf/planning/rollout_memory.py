"""Compute the bytes that a rollout takes on one rank in addition to the models' states."""

from __future__ import annotations

from collections import Counter

from rlhf.config.choices import Backend, Dtype, When
from rlhf.config.roles import SHARDED_WEIGHTS, stage_of
from rlhf.planning.memory_model import HALF, SINGLE, Parts
from rlhf.planning.phase_memory import PhaseMemory

# Bytes per logit of a captured decode step: the logit in half precision and in fp32, the logit
# divided by the temperature, and the probability.
GRAPH_LOGIT = HALF + 3 * SINGLE


def copied_weight_bytes(scene: PhaseMemory, *, is_gathered: bool) -> int:
    """Return the bytes of weights that the fast rollout copies.

    On a CPU all weights are copied into the order in which decoding reads them. A GPU reads the
    model's own weights, unless they are in another precision.
    """
    at, actor = scene.at, scene.models[0]
    if not at.machine.is_gpu:
        return 0 if is_gathered else actor.weights * at.bytes_per_weight(actor)
    is_rounded = at.bytes_per_weight(actor) != HALF and at.machine.dtype is not Dtype.fp32
    return actor.weights * HALF if is_rounded else 0


def gathers_weights(scene: PhaseMemory, backend: Backend, needed: int) -> bool:
    """Return True if the rollout gathers all sharded weights once, instead of at every token.

    ``needed`` is the bytes that one rank needs in that case.
    """
    match backend:
        case Backend.hf:
            return False
        case Backend.hybrid_engine:
            return True
        case _:
            choice = scene.config.rollout.gather_weights
            return choice is When.always or (choice is When.auto and needed <= scene.limit)


def graph_bytes(scene: PhaseMemory, during: Parts, *, rows: int) -> Parts:
    """Return the bytes by purpose that CUDA graphs of ``rows`` rows keep between rollouts.

    ``during`` has the bytes by purpose of the rollout. The result is empty without CUDA graphs.
    """
    rollout, actor = scene.config.rollout, scene.models[0]
    uses_graphs = rollout.cuda_graphs and rollout.backend is Backend.fast
    is_sharded = stage_of(actor.role, scene.at.zero) == SHARDED_WEIGHTS
    if is_sharded or not uses_graphs or not scene.at.machine.is_gpu:
        return Counter()
    return Counter(
        kv_cache=during["kv_cache"],
        logits=rows * actor.shape.vocab * GRAPH_LOGIT,
        gathered_weights=copied_weight_bytes(scene, is_gathered=False),
    )
