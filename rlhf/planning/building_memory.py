"""Compute the peak memory of one rank while the models of a phase are built."""

from __future__ import annotations

from collections import Counter

from rlhf.config.roles import Role
from rlhf.models.model_uses import ModelUse
from rlhf.planning.memory_model import HALF, SINGLE, Parts
from rlhf.planning.phase_memory import PhaseMemory

BUILDING = "building"  # name of the moment in which models are built, before the first step
ROUNDED_AT_ONCE = 2**24  # weights; as in rlhf/engine/masters.py

# The order in which models are built (rlhf/phases/ppo/rlhf_engine.py).
ORDER = (Role.reward, Role.sft, Role.reward_training, Role.actor, Role.reference, Role.critic)


def memory_outside_steps(scene: PhaseMemory) -> dict[str, Parts]:
    """Return the bytes by purpose at two moments: while models are built, and between steps."""
    return {BUILDING: _building_peak_bytes(scene), "between steps": scene.resident_bytes()}


def _building_peak_bytes(scene: PhaseMemory) -> Parts:
    """Return the peak bytes by purpose while the models of ``scene`` are built, one by one."""
    states = scene.resident_bytes()
    if not scene.at.machine.is_gpu:
        return states
    built, peaks = Counter(process=states["process"]), []
    for model in sorted(scene.models, key=lambda model: ORDER.index(model.role)):
        held = Counter(scene.states[model.role].device)
        del held["gradients"]
        moments = _first_step_moment_bytes(scene, model)
        held["optimizer"] -= moments
        built += held
        # DeepSpeed 0.19.8 takes a trial step, for which it allocates fp32 gradients of zeros.
        zeros = 0 if scene.runs_on_torch(model) else moments // 2
        peaks.append(built + Counter(optimizer=zeros, weights=_rounding_copy_bytes(scene, model)))
    return max(peaks, key=Counter.total)


def _rounding_copy_bytes(scene: PhaseMemory, model: ModelUse) -> int:
    """Return the bytes of fp32 copies of frozen weights while the torch engine rounds them."""
    if not (scene.runs_on_torch(model) and scene.at.bytes_per_weight(model) == HALF):
        return 0
    return SINGLE * min(model.weights - min(model.trained, model.weights), ROUNDED_AT_ONCE)


def _first_step_moment_bytes(scene: PhaseMemory, model: ModelUse) -> int:
    """Return the bytes of moments allocated in the first step; 0 for ``SplitAdamW``."""
    has_half = scene.at.bytes_per_weight(model) == HALF
    if has_half and scene.runs_on_torch(model):
        return 0
    states = scene.states[model.role].device["optimizer"]
    return states * 2 // 3 if has_half else states  # in half precision 1/3 are fp32 masters
