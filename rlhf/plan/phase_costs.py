"""Compute memory and time of one phase under a ZeRO setting, and choose its micro-batches."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace

from rlhf.config.batches import (
    BatchPlan,
    RolloutPlan,
    batch_plans,
    divisors,
    num_added_micro_batches,
    num_ranks,
    rollout_plan,
    sequences_per_example,
)
from rlhf.config.choices import Dtype, Phase, When
from rlhf.config.roles import Role
from rlhf.models.model_uses import ModelUse
from rlhf.options import Backend
from rlhf.plan import memory_model, time_model
from rlhf.plan.memory_model import HALF, SINGLE, Parts
from rlhf.plan.phase_memory import PhaseMemory
from rlhf.plan.phase_plan import BUILDING, PhasePlan, choose_phase_plan

KEEP_GRAPHS_BELOW = 0.93  # share of the memory limit up to which CUDA graphs are kept
HF_LAYER_FACTOR = 6.0  # overhead per layer of generate(), as a multiple of the fast rollout's
# Bytes per logit of a captured decode step: the logit in half precision and in fp32, the logit
# divided by the temperature, and the probability.
GRAPH_LOGIT_BYTES = HALF + 3 * SINGLE
# Further bytes with top-p: the mask and the masked probability, and the logits of smaller graphs.
TOP_P_LOGIT_BYTES = 1 + SINGLE + HALF
ROUNDED_AT_ONCE = 2**24  # weights that are rounded at a time, as in rlhf/engine/masters.py
# The order in which models are built (rlhf/phases/ppo/rlhf_engine.py).
BUILD_ORDER = (Role.reward, Role.sft, Role.reward_training, Role.actor, Role.reference, Role.critic)


def plan_phase(scene: PhaseMemory, earlier: PhasePlan | None = None) -> PhasePlan:
    """Return the plan of a phase with the fastest micro-batch that fits, or with least memory.

    If an ``earlier`` plan is given, its micro-batch and rows are used. Only then are sampling
    processes (rollout.overlap) planned, so that they do not affect these two choices.
    """
    if scene.phase is Phase.ppo:
        if earlier and scene.config.rollout.overlap:
            from rlhf.options.ahead.overlap_plan import plan_overlap

            return plan_overlap(scene, lambda other: _plan_ppo(other, earlier), _plan_rollout)
        return _plan_ppo(scene, earlier)
    plan = batch_plans(scene.config)[scene.phase]
    sizes = [earlier.micro_batch] if earlier else _candidate_micro_batches(scene, plan)
    return choose_phase_plan([_plan_supervised(scene, plan, micro) for micro in sizes], scene)


def _candidate_micro_batches(scene: PhaseMemory, plan: BatchPlan) -> list[int]:
    config, phase = scene.config, scene.phase
    if getattr(config, phase.value).micro_batch_size is not None:
        return [plan.micro]
    cap = max(1, config.hardware.max_micro_batch_size // sequences_per_example(config, phase))
    return [size for size in divisors(plan.per_rank) if size <= cap]


def _plan_supervised(scene: PhaseMemory, plan: BatchPlan, micro: int) -> PhasePlan:
    """Plan SFT, reward model training or DPO with micro-batches of size ``micro``."""
    at = scene.at
    pair = sequences_per_example(scene.config, scene.phase)
    longest = scene.load.longest_length
    learner, *others = scene.models
    shape = {"sequences": pair * micro, "tokens": longest}
    passes = plan.per_rank // micro
    moments = bytes_outside_steps(scene) | {
        "training": scene.training_peak(learner, **shape, positions=longest, passes=passes),
    }
    if others:
        moments["reference"] = scene.scoring_peak(others, **shape)
    seconds = {"train": 0.0, "score": 0.0}
    for model in scene.models:
        work = scene.forward_work(model, sequences=pair * plan.per_rank, micro=pair * micro)
        if model.trained:
            seconds["train"] += time_model.training_seconds(at, model, work)
        # Without a reference model, DPO's policy is the reference when its adapters are off.
        if not model.trained or (scene.phase is Phase.dpo and not others):
            seconds["score"] += time_model.no_grad_pass_seconds(at, model, work)
    for costs in at.methods:
        tokens = scene.response_tokens
        seconds |= costs.added_step_seconds(scene.config, scene.phase, tokens, seconds)
    return PhasePlan(
        phase=scene.phase,
        micro_batch=micro,
        moments=moments,
        host=scene.offloaded_bytes,
        step_seconds={part: value for part, value in seconds.items() if value},
        steps=scene.load.steps,
        other_seconds=seconds_outside_training_steps(scene, pair * micro),
    )


def _plan_ppo(scene: PhaseMemory, earlier: PhasePlan | None) -> PhasePlan:
    """Plan PPO; choose the rows of the rollout and the micro-batch independently."""
    config = scene.config
    rollout = rollout_plan(config)
    learning = batch_plans(config)[Phase.ppo]
    counts = [earlier.rows] if earlier and earlier.rows else _candidate_rows(scene, rollout)
    sizes = [earlier.micro_batch] if earlier else _candidate_micro_batches(scene, learning)
    sampled = [_plan_rollout(scene, rollout.per_rank, rows) for rows in counts]
    generation = choose_phase_plan(sampled, scene)
    trained = [_plan_training(scene, rollout, learning, micro, generation) for micro in sizes]
    training = choose_phase_plan(trained, scene)
    kept = cuda_graph_bytes(scene, generation.peak_parts, rows=generation.rows or 0)
    most = max(generation.peak_bytes, training.peak_bytes) + kept.total()
    fits = most <= scene.memory_limit * KEEP_GRAPHS_BELOW
    choice = config.rollout.keep_graphs
    keeps = bool(kept) and (choice is When.always or (choice is When.auto and fits))
    if keeps:
        training = replace(training, moments=training.moments_with(kept))
    seconds = generation.step_seconds | training.step_seconds
    for costs in scene.at.methods:
        seconds |= costs.added_step_seconds(config, Phase.ppo, scene.response_tokens, seconds)
    return replace(
        training,
        rows=generation.rows,
        gathers=generation.gathers,
        keeps_graphs=keeps,
        moments=generation.moments | training.moments,
        step_seconds=seconds,
    )


def _candidate_rows(scene: PhaseMemory, rollout: RolloutPlan) -> list[int]:
    """Return candidate numbers of responses to decode at once; hf and vLLM decode all at once."""
    share, settings = rollout.per_rank, scene.config.rollout
    if settings.backend in (Backend.hf, Backend.vllm_server):
        return [share]
    if settings.max_rows is not None:
        return [min(settings.max_rows, share)]
    few = range(1, math.isqrt(share - 1) + 2)  # candidate numbers of rows, and of waves
    return sorted({*few, *(math.ceil(share / waves) for waves in few)})


def _plan_rollout(scene: PhaseMemory, responses: int, rows: int) -> PhasePlan:
    """Plan the rollout of ``responses`` in one PPO step, of which ``rows`` are decoded at once."""
    config, at, actor = scene.config, scene.at, scene.models[0]
    settings, size = config.rollout, scene.at.bytes_per_weight(scene.models[0])
    if settings.backend is Backend.vllm_server:
        from rlhf.options.vllm.costs import plan_server_rollout

        return plan_server_rollout(scene, build_sampling, config.ppo.rollout_batch_size)
    parts = scene.resident_bytes()
    parts["kv_cache"] = _kv_cache_bytes(scene, rows)
    prefill = min(memory_model.PREFILL_TOKENS, rows * scene.load.longest_length)
    wide = 4 * actor.shape.hidden + 2 * actor.shape.ffn
    parts["activations"] = prefill * wide * size + rows * actor.shape.vocab * memory_model.SINGLE
    whole = actor.weights * size // scene.tensor_parallel
    gathers = at.is_sharded(actor) and gathers_weights_once(scene, parts.total() + whole)
    if gathers:
        parts["gathered_weights"] = whole
    elif at.is_sharded(actor):
        parts["kv_cache"] = _kv_cache_bytes(scene, rows, is_layerwise=True)
    if settings.backend is Backend.fast:
        parts["gathered_weights"] += copied_weight_bytes(scene, is_gathered=gathers)
    if not gathers:
        parts["buffers"] += memory_model.gathered_weight_bytes(at, actor)
    shared = min(config.ppo.responses_per_prompt, rows) if settings.backend is Backend.fast else 1
    sampling = build_sampling(scene, responses=responses, rows=rows, gathers=gathers)
    sampling = replace(sampling, shared=shared)
    return PhasePlan(
        phase=Phase.ppo,
        micro_batch=0,
        rows=rows,
        gathers=gathers,
        moments={"generation": parts},
        host=scene.offloaded_bytes,
        step_seconds={"generate": time_model.sampling_seconds(at, actor, sampling)},
        steps=scene.load.steps,
    )


def _kv_cache_bytes(scene: PhaseMemory, rows: int, *, is_layerwise: bool = False) -> int:
    """Return the bytes of the KV cache of the ranks' rollout, for the longest allowed prompts.

    ``is_layerwise``: the weights are gathered layer by layer, and rows share no pages.
    """
    config, actor = scene.config, scene.models[0]
    settings, size = config.rollout, scene.at.bytes_per_weight(actor)
    tokens = settings.max_prompt_tokens + config.token_limit_after_prompt[1]
    if config.environment.is_used:
        rows *= 2  # an episode that waits keeps its KV cache while its row decodes another
    elif settings.mean_response_tokens is not None and not is_layerwise:
        mean = settings.max_prompt_tokens + settings.mean_response_tokens
        tokens, rows = memory_model.shared_page_tokens(rows, longest=tokens, mean=mean), 1
    # A rank of a tensor-parallel group holds all rows of the group, but only its own heads.
    return memory_model.kv_cache_bytes(actor.shape, rows=rows, tokens=tokens, size=size)


def _plan_training(
    scene: PhaseMemory, rollout: RolloutPlan, learning: BatchPlan, micro: int, sampling: PhasePlan
) -> PhasePlan:
    """Plan scoring and training of one PPO step with micro-batches of size ``micro``.

    Evaluations sample as ``sampling`` does.
    """
    config, at = scene.config, scene.at
    response = config.token_limit_after_prompt[1]
    longest = scene.load.longest_length + response
    moments = bytes_outside_steps(scene) | {
        "scoring": scene.scoring_peak(scene.models, sequences=micro, tokens=longest),
    }
    score, train = 0.0, 0.0
    updates = config.ppo.ppo_epochs * rollout.mini_batches
    for model in scene.models:
        passes = _count_scoring_passes(scene) if model.role is Role.actor else 1
        score += passes * scene.no_grad_seconds(
            model, sequences=rollout.per_rank, micro=micro, answer=scene.response_tokens
        )
        if not model.trained:
            continue
        moments[f"training of the {model.role}"] = scene.training_peak(
            model,
            sequences=micro,
            tokens=longest,
            positions=response,
            passes=learning.per_rank // micro + num_added_micro_batches(config),
        )
        batch = scene.forward_work(
            model, sequences=learning.per_rank, micro=micro, answer=scene.response_tokens
        )
        train += updates * time_model.training_seconds(at, model, batch)
    return PhasePlan(
        phase=Phase.ppo,
        micro_batch=micro,
        moments=moments,
        host=scene.offloaded_bytes,
        step_seconds={"score": score, "train": train},
        steps=scene.load.steps,
        other_seconds=seconds_outside_ppo_steps(scene, micro, sampling),
    )


def _count_scoring_passes(scene: PhaseMemory) -> int:
    """Return the number of forward passes in which the actor scores a rollout before training."""
    if scene.models[0].scores_at_once:
        return 1
    rollout = scene.config.rollout
    reuses_logprobs = rollout.backend is Backend.fast and rollout.reuse_logprobs is not When.never
    is_reference = all(model.role is not Role.reference for model in scene.models)
    return (not reuses_logprobs) + is_reference  # the actor without adapters is the reference


def build_sampling(
    scene: PhaseMemory, *, responses: int, rows: int, gathers: bool = False
) -> time_model.Sampling:
    """Return the sampling of ``responses``, ``rows`` at a time, to prompts of mean length.

    Episodes, most of which end early, have their expected length, other responses the maximum or
    rollout.mean_response_tokens.
    """
    longest = scene.config.token_limit_after_prompt[1]
    mean = scene.config.rollout.mean_response_tokens
    ends_early = scene.config.environment.is_used
    return time_model.Sampling(
        responses=responses,
        rows=rows,
        prompt_tokens=scene.load.mean_tokens,
        response_tokens=scene.response_tokens if ends_early else mean or longest,
        tensor_parallel=scene.tensor_parallel,
        gathers=gathers,
        layer_factor=HF_LAYER_FACTOR if scene.config.rollout.backend is Backend.hf else 1.0,
    )


def seconds_outside_training_steps(scene: PhaseMemory, micro: int) -> dict[str, float]:
    """Return the seconds of a supervised phase outside its steps, by activity.

    The result is empty if no examples are held out.
    """
    if not scene.load.held_out:
        return {}
    config, phase = scene.config, scene.phase
    settings = getattr(config, phase.value)
    held_out = min(scene.load.held_out, settings.eval_examples)
    evaluated = sequences_per_example(config, phase) * held_out / num_ranks(config)
    times = 2 if phase is Phase.sft else 1
    if settings.eval_every and scene.load.steps:
        times += (scene.load.steps - 1) // settings.eval_every
    passes = (scene.no_grad_seconds(m, sequences=evaluated, micro=micro) for m in scene.models)
    per_evaluation = sum(passes)
    return {"evaluate": times * per_evaluation, "prepare": scene.preparation_seconds}


def seconds_outside_ppo_steps(
    scene: PhaseMemory, micro: int, sampling: PhasePlan
) -> dict[str, float]:
    """Return the seconds of PPO outside its steps, by activity.

    The policy answers held-out prompts before and after training and, with ppo.eval_every, during
    it. The result is empty if no prompts are held out.
    """
    config, load = scene.config, scene.load
    if not load.held_out:
        return {}
    prompts = math.ceil(min(load.held_out, config.ppo.eval_prompts) / scene.at.machine.ranks)
    times = 2 + (config.ppo.ema_beta > 0)  # at the end the average answers too
    if config.ppo.eval_every and load.steps:
        times += load.steps // config.ppo.eval_every
    seconds_each = 0.0
    if config.rollout.backend is Backend.vllm_server:
        share = min(load.held_out, config.ppo.eval_prompts) / config.ppo.rollout_batch_size
        seconds_each = share * sampling.step_seconds.get("generate", 0.0)
    elif prompts:
        rows = min(sampling.rows or prompts, prompts)
        answers = build_sampling(scene, responses=prompts, rows=rows, gathers=sampling.gathers)
        seconds_each = time_model.sampling_seconds(scene.at, scene.models[0], answers)
    for model in scene.models:
        seconds_each += scene.no_grad_seconds(
            model, sequences=prompts, micro=micro, answer=scene.response_tokens
        )
    seconds = times * seconds_each + _corpus_seconds(scene, micro)
    return {"evaluate": seconds, "prepare": scene.preparation_seconds}


def _corpus_seconds(scene: PhaseMemory, micro: int) -> float:
    """Return the seconds of two forward passes of the policy over the corpus's held-out blocks."""
    config = scene.config
    if config.data.ptx_path is None:
        return 0.0
    block = config.rollout.max_prompt_tokens + config.token_limit_after_prompt[1]
    blocks = replace(scene, load=replace(scene.load, lengths=(block,)))
    sequences = config.ppo.ptx_eval_blocks
    return 2 * blocks.no_grad_seconds(scene.models[0], sequences=sequences, micro=micro)


def copied_weight_bytes(scene: PhaseMemory, *, is_gathered: bool) -> int:
    """Return the bytes of weights that the fast rollout copies.

    On a CPU, weights that are not gathered are copied into the order in which decoding reads them.
    On a GPU, weights are copied only if the model keeps them in another precision than decoding.
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
    backend, choice = scene.config.rollout.backend, scene.config.rollout.gather_weights
    if backend in (Backend.hybrid_engine, Backend.hf):
        return backend is Backend.hybrid_engine
    return choice is When.always or (choice is When.auto and needed <= scene.memory_limit)


def cuda_graph_bytes(scene: PhaseMemory, during: Parts, *, rows: int) -> Parts:
    """Return the bytes by purpose that CUDA graphs of ``rows`` rows keep between rollouts.

    ``during`` has the bytes by purpose during the rollout. Without CUDA graphs, nothing is kept.
    """
    rollout, actor = scene.config.rollout, scene.models[0]
    uses_graphs = rollout.cuda_graphs and rollout.backend is Backend.fast
    if scene.at.is_sharded(actor) or not uses_graphs or not scene.at.machine.is_gpu:
        return Counter()
    per_logit = GRAPH_LOGIT_BYTES + (TOP_P_LOGIT_BYTES if rollout.top_p < 1 else 0)
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
    for model in sorted(scene.models, key=lambda model: BUILD_ORDER.index(model.role)):
        held = Counter(scene.model_states[model.role].device)
        del held["gradients"]
        adam_bytes = _first_step_adam_bytes(scene, model)
        held["optimizer"] -= adam_bytes
        built += held
        # DeepSpeed 0.19.8 takes a trial step, for which it allocates fp32 gradients of zeros.
        zeros = 0 if scene.at.runs_on_torch(model) else adam_bytes // 2
        peaks.append(built + Counter(optimizer=zeros, weights=_rounding_copy_bytes(scene, model)))
    return max(peaks, key=Counter.total)


def _rounding_copy_bytes(scene: PhaseMemory, model: ModelUse) -> int:
    """Return the bytes of fp32 copies of frozen weights while the torch engine rounds them."""
    if not (scene.at.runs_on_torch(model) and scene.at.bytes_per_weight(model) == HALF):
        return 0
    return SINGLE * min(model.weights - min(model.trained, model.weights), ROUNDED_AT_ONCE)


def _first_step_adam_bytes(scene: PhaseMemory, model: ModelUse) -> int:
    """Return the bytes of Adam's moments that the first step allocates; 0 for ``SplitAdamW``."""
    is_half_precision = scene.at.bytes_per_weight(model) == HALF
    if is_half_precision and scene.at.runs_on_torch(model):
        return 0
    states = scene.model_states[model.role].device["optimizer"]
    # With weights in half precision, a third are masters, which exist before the step.
    return states * 2 // 3 if is_half_precision else states
