"""Compute memory and time of a phase outside its training steps.

Memory is needed while models are built, and for rollouts. Time is needed for evaluations, and to
build and save models.
"""

from __future__ import annotations

import math
from collections import Counter

from rlhf.config.batches import num_data_parallel_ranks
from rlhf.config.choices import Dtype, Phase, When
from rlhf.config.roles import SHARDED_WEIGHTS, Role, stage_of
from rlhf.models.model_uses import ModelUse
from rlhf.options import Backend
from rlhf.plan import time_model
from rlhf.plan.memory_model import HALF, SINGLE, Parts
from rlhf.plan.phase_memory import PhaseMemory
from rlhf.plan.phase_plan import BUILDING

HF_LAYER_FACTOR = 6.0  # overhead per layer of generate(), as a multiple of the fast rollout's
# Bytes per logit of a captured decode step: the logit in half precision and in fp32, the logit
# divided by the temperature, and the probability.
GRAPH_LOGIT = HALF + 3 * SINGLE
# Further bytes with top-p: the mask and the masked probability, and the logits of smaller graphs.
TOP_P_LOGIT = 1 + SINGLE + HALF
ROUNDED_AT_ONCE = 2**24  # weights that are rounded at a time, as in rlhf/engine/masters.py

# The order in which models are built (rlhf/phases/ppo/rlhf_engine.py).
ORDER = (Role.reward, Role.sft, Role.reward_training, Role.actor, Role.reference, Role.critic)


def build_sampling(
    scene: PhaseMemory, *, responses: int, rows: int, gathers: bool = False
) -> time_model.Sampling:
    """Return the sampling of ``responses``, ``rows`` at a time, to prompts of mean length.

    Responses have their expected length if most of them end early, otherwise the maximum length.
    """
    longest = scene.config.token_limit_after_prompt[1]
    return time_model.Sampling(
        responses=responses,
        rows=rows,
        prompt_tokens=scene.load.mean_tokens,
        response_tokens=scene.response_tokens if scene.generation_settings.ends_early else longest,
        tensor_parallel=scene.generation_settings.tensor_parallel,
        gathers=gathers,
        layer_factor=HF_LAYER_FACTOR if scene.config.rollout.backend is Backend.hf else 1.0,
    )


def seconds_outside_training_steps(scene: PhaseMemory, micro: int) -> dict[str, float]:
    """Return the seconds of a supervised phase outside its steps, by activity.

    The result is empty if the number of held-out examples is unknown.
    """
    if not scene.load.held_out:
        return {}
    config, phase = scene.config, scene.phase
    settings = getattr(config, phase.value)
    pair = 1 if phase is Phase.sft else 2
    held_out = min(scene.load.held_out, settings.eval_examples)
    evaluated = pair * held_out / num_data_parallel_ranks(config)
    times = 2 if phase is Phase.sft else 1
    if settings.eval_every and scene.load.steps:
        times += (scene.load.steps - 1) // settings.eval_every
    reading = 0.0
    for model in scene.models:
        reading += scene.no_grad_seconds(model, sequences=evaluated, micro=micro)
    return {"evaluate": times * reading, "prepare": scene.preparation_seconds}


def seconds_outside_ppo_steps(scene: PhaseMemory, micro: int) -> dict[str, float]:
    """Return the seconds of PPO outside its steps, by activity.

    The policy answers held-out prompts before and after training and, with ppo.eval_every, during
    it. The result is empty if the number of held-out prompts is unknown.
    """
    config, load = scene.config, scene.load
    if not load.held_out:
        return {}
    prompts = math.ceil(min(load.held_out, config.ppo.eval_prompts) / scene.at.machine.ranks)
    times = 2 + sum(each(config) for each in scene.at.hooks("num_added_evaluations"))
    if config.ppo.eval_every and load.steps:
        times += load.steps // config.ppo.eval_every
    answering = 0.0
    if prompts:
        how = build_sampling(scene, responses=prompts, rows=min(micro, prompts))
        answering = time_model.sampling_seconds(scene.at, scene.models[0], how)
    for model in scene.models:
        answering += scene.no_grad_seconds(
            model, sequences=prompts, micro=micro, answer=scene.response_tokens
        )
    further = sum(each(scene, micro) for each in scene.at.hooks("added_evaluation_seconds"))
    return {"evaluate": times * answering + further, "prepare": scene.preparation_seconds}


def copied_weight_bytes(scene: PhaseMemory, *, is_gathered: bool) -> int:
    """Return the bytes of weights that the fast rollout copies.

    On a CPU, all weights are copied into the order in which decoding reads them. On a GPU, weights
    are copied only if the model keeps them in another precision than decoding uses.
    """
    at, actor = scene.at, scene.models[0]
    if not at.machine.is_gpu:
        return 0 if is_gathered else actor.weights * at.bytes_per_weight(actor)
    is_rounded = at.bytes_per_weight(actor) != HALF and at.machine.dtype is not Dtype.fp32
    return actor.weights * HALF if is_rounded else 0


def gathers_weights_once(scene: PhaseMemory, needed: int) -> bool:
    """Return True if the rollout gathers all sharded weights once, instead of at every token.

    ``needed`` is the bytes that one rank needs if it gathers all weights at once.
    """
    if scene.generation_settings.gathers is not None:
        return scene.generation_settings.gathers
    choice = scene.config.rollout.gather_weights
    return choice is When.always or (choice is When.auto and needed <= scene.memory_limit)


def cuda_graph_bytes(scene: PhaseMemory, during: Parts, *, rows: int) -> Parts:
    """Return the bytes by purpose that CUDA graphs of ``rows`` rows keep between rollouts.

    ``during`` has the bytes by purpose during the rollout. Without CUDA graphs, nothing is kept.
    """
    rollout, actor = scene.config.rollout, scene.models[0]
    uses_graphs = rollout.cuda_graphs and rollout.backend is Backend.fast
    is_sharded = stage_of(actor.role, scene.at.zero) == SHARDED_WEIGHTS
    if is_sharded or not uses_graphs or not scene.at.machine.is_gpu:
        return Counter()
    per_logit = GRAPH_LOGIT + (TOP_P_LOGIT if rollout.top_p < 1 else 0)
    return Counter(
        kv_cache=during["kv_cache"],
        logits=rows * actor.shape.vocab * per_logit,
        gathered_weights=copied_weight_bytes(scene, is_gathered=False),
    )


def bytes_outside_steps(scene: PhaseMemory) -> dict[str, Parts]:
    """Return the bytes by purpose at two moments: while models are built, and between steps."""
    return {BUILDING: _building_peak_bytes(scene), "between steps": scene.resident_bytes()}


def _building_peak_bytes(scene: PhaseMemory) -> Parts:
    """Return the peak bytes by purpose while the models of ``scene`` are built, one by one."""
    states = scene.resident_bytes()
    if not scene.at.machine.is_gpu:
        return states
    built, peaks = Counter(process=states["process"]), []
    for model in sorted(scene.models, key=lambda model: ORDER.index(model.role)):
        held = Counter(scene.model_states[model.role].device)
        del held["gradients"]
        moments = _first_step_adam_bytes(scene, model)
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


def _first_step_adam_bytes(scene: PhaseMemory, model: ModelUse) -> int:
    """Return the bytes of Adam's moments that the first step allocates; 0 for ``SplitAdamW``."""
    has_half = scene.at.bytes_per_weight(model) == HALF
    if has_half and scene.runs_on_torch(model):
        return 0
    states = scene.model_states[model.role].device["optimizer"]
    return states * 2 // 3 if has_half else states  # 1/3 are masters, which exist before the step
