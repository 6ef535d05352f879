"""Compute the peak memory of one rank while the models of a phase are built."""

from __future__ import annotations

from collections import Counter

from rlhf.config.roles import Role
from rlhf.models.model_uses import ModelUse
from rlhf.planning.memory_model import HALF, SINGLE, Parts
from rlhf.planning.phase_memory import PhaseMemory

BUILDING = "building"  # the moment before the first step
ROUNDED_AT_ONCE = 2**24  # weights; as in rlhf/engine/masters.py

# The order in which models are built (rlhf/phases/ppo/rlhf_engine.py).
ORDER = (Role.reward, Role.sft, Role.reward_training, Role.actor, Role.reference, Role.critic)


def moments_outside_steps(scene: PhaseMemory) -> dict[str, Parts]:
    """Return the bytes by purpose while the models of a phase are built, and between its steps."""
    return {BUILDING: _building(scene), "between steps": scene.resident()}


def _building(scene: PhaseMemory) -> Parts:
    """Return the peak bytes by purpose while the models of ``scene`` are built, one by one."""
    states = scene.resident()
    if not scene.at.machine.is_gpu:
        return states
    built, peaks = Counter(process=states["process"]), []
    for model in sorted(scene.models, key=lambda model: ORDER.index(model.role)):
        held = Counter(scene.states[model.role].device)
        del held["gradients"]
        moments = _later_moments(scene, model)
        held["optimizer"] -= moments
        built += held
        # DeepSpeed 0.19.8 tries its optimizer, with gradients of zero in fp32.
        zeros = 0 if scene.runs_on_torch(model) else moments // 2
        peaks.append(built + Counter(optimizer=zeros, weights=_rounded_at_once(scene, model)))
    return max(peaks, key=Counter.total)


def _rounded_at_once(scene: PhaseMemory, model: ModelUse) -> int:
    """Return the bytes of frozen weights that the torch engine has in fp32 while it rounds them."""
    if not (scene.runs_on_torch(model) and scene.at.size(model) == HALF):
        return 0
    return SINGLE * min(model.weights - min(model.trained, model.weights), ROUNDED_AT_ONCE)


def _later_moments(scene: PhaseMemory, model: ModelUse) -> int:
    """Return the bytes of moments that the first step makes; ``SplitAdamW`` has them at once."""
    has_half = scene.at.size(model) == HALF
    if has_half and scene.runs_on_torch(model):
        return 0
    states = scene.states[model.role].device["optimizer"]
    return states * 2 // 3 if has_half else states  # beside fp32 masters, or weights
