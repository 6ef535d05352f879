"""Estimate the time of a phase outside its steps: evaluations, building and saving models."""

from __future__ import annotations

import math
from dataclasses import replace

from rlhf.config.batches import num_data_parallel_ranks
from rlhf.config.choices import Backend, Phase
from rlhf.planning import time_model
from rlhf.planning.phase_memory import PhaseMemory

HF_LAYER_FACTOR = 6.0  # overhead per layer of generate(), relative to the fast rollout


def tensor_parallel_size(scene: PhaseMemory) -> int:
    """Return the tensor-parallel size of generation: the ranks that share one copy of weights."""
    rollout = scene.config.rollout
    is_hybrid = rollout.backend is Backend.hybrid_engine
    return rollout.hybrid_engine.inference_tp_size if is_hybrid else 1


def build_sampling(
    scene: PhaseMemory, *, responses: int, rows: int, gathers: bool = False
) -> time_model.Sampling:
    """Return a ``Sampling`` of responses of maximum length to prompts of mean length."""
    rollout = scene.config.rollout
    return time_model.Sampling(
        responses=responses,
        rows=rows,
        prompt_tokens=scene.load.tokens,
        response_tokens=scene.config.tokens_after_prompt[1],
        tensor_parallel=tensor_parallel_size(scene),
        gathers=gathers,
        layer_factor=HF_LAYER_FACTOR if rollout.backend is Backend.hf else 1.0,
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
    evaluated = (
        pair * min(scene.load.held_out, settings.eval_examples) / num_data_parallel_ranks(config)
    )
    times = 2 if phase is Phase.sft else 1
    if settings.eval_every and scene.load.steps:
        times += (scene.load.steps - 1) // settings.eval_every
    reading = sum(
        time_model.no_grad_pass_seconds(
            scene.at,
            model,
            scene.forward_work(model, sequences=evaluated, micro=micro),
        )
        for model in scene.models
    )
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
    times = 2 + bool(config.ppo.ema_beta)
    if config.ppo.eval_every and load.steps:
        times += load.steps // config.ppo.eval_every
    answering = 0.0
    if prompts:
        how = build_sampling(scene, responses=prompts, rows=min(micro, prompts))
        answering = time_model.sampling_seconds(scene.at, scene.models[0], how)
    response = config.tokens_after_prompt[1]
    for model in scene.models:
        work = scene.forward_work(
            model, sequences=prompts, micro=micro, answer=scene.response_tokens
        )
        answering += time_model.no_grad_pass_seconds(scene.at, model, work)
    actor = scene.models[0]
    block = config.rollout.max_prompt_tokens + response
    blocks = replace(scene, load=replace(load, lengths=(block,)))
    num_blocks = config.ppo.ptx_eval_blocks if config.data.ptx_path is not None else 0
    corpus = blocks.forward_work(actor, sequences=num_blocks, micro=micro)
    reading = time_model.no_grad_pass_seconds(scene.at, actor, corpus)
    return {"evaluate": times * answering + 2 * reading, "prepare": scene.preparation_seconds}
