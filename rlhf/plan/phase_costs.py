"""Compute memory and time of one phase under a ZeRO setting, and choose its micro-batches."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace

from rlhf.base.cpu import num_usable_cores
from rlhf.config.batches import (
    BatchPlan,
    RolloutPlan,
    divide_cores,
    divisors,
    phase_plans,
    rollout_plan,
)
from rlhf.config.choices import Phase, When
from rlhf.config.roles import SHARDED_WEIGHTS, Role, stage_of
from rlhf.options import Backend, PpoConfig
from rlhf.options.branches.keys import ValueTargets
from rlhf.plan import memory_model, time_model
from rlhf.plan.outside_steps import (
    BUILDING,
    build_sampling,
    copied_weight_bytes,
    gathers_weights,
    graph_bytes,
    memory_outside_steps,
    seconds_outside_ppo_steps,
    seconds_outside_training_steps,
    tensor_parallel_size,
)
from rlhf.plan.phase_memory import PhaseMemory
from rlhf.plan.phase_plan import PhasePlan, best_plan

KEEPS_BELOW = 0.9  # keep CUDA graphs only below this share of the memory: plans may be 10 % off


def plan_phase(scene: PhaseMemory, like: PhasePlan | None = None) -> PhasePlan:
    """Return the plan of a phase with the fastest micro-batch that fits, else the least memory.

    If ``like`` is given, the micro-batch and the rows of that earlier plan are used. Only then are
    memory and time of rollout.overlap counted: it must not change what is chosen, since sampling
    in turn and beside training are the same run.
    """
    if scene.phase is Phase.ppo:
        if like is not None and scene.config.rollout.overlap:
            return _plan_beside_training(scene, like)
        return _plan_ppo(scene, like)
    plan = phase_plans(scene.config)[scene.phase]
    sizes = [like.micro_batch] if like else _candidate_micro_batches(scene, plan)
    return best_plan([_plan_supervised(scene, plan, micro) for micro in sizes], scene)


def _candidate_micro_batches(scene: PhaseMemory, plan: BatchPlan) -> list[int]:
    config, phase = scene.config, scene.phase
    chosen = getattr(config, phase.value).micro_batch_size
    if chosen is not None:
        return [plan.micro]
    pair = 2 if phase.learns_from_pairs else 1
    cap = max(1, config.hardware.max_micro_batch_size // pair)
    return [size for size in divisors(plan.per_rank) if size <= cap]


def _plan_supervised(scene: PhaseMemory, plan: BatchPlan, micro: int) -> PhasePlan:
    """Plan SFT, reward model training or DPO with micro-batches of size ``micro``."""
    at = scene.at
    pair = 2 if scene.phase.learns_from_pairs else 1
    longest = scene.load.longest
    learner, *others = scene.models
    shape = {"sequences": pair * micro, "tokens": longest}
    passes = plan.per_rank // micro
    moments = memory_outside_steps(scene) | {
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
    return PhasePlan(
        phase=scene.phase,
        micro_batch=micro,
        moments=moments,
        host=scene.host,
        step_seconds={part: value for part, value in seconds.items() if value},
        steps=scene.load.steps,
        other_seconds=seconds_outside_training_steps(scene, pair * micro),
    )


def _plan_ppo(scene: PhaseMemory, like: PhasePlan | None) -> PhasePlan:
    """Plan PPO; choose the rows of the rollout and the micro-batch independently."""
    config = scene.config
    rollout = rollout_plan(config)
    learning = phase_plans(config)[Phase.ppo]
    counts = [like.rows] if like and like.rows else _candidate_rows(scene, rollout)
    sizes = [like.micro_batch] if like else _candidate_micro_batches(scene, learning)
    sampled = [_plan_rollout(scene, rollout, rows) for rows in counts]
    trained = [_plan_training(scene, rollout, learning, micro) for micro in sizes]
    generation, training = best_plan(sampled, scene), best_plan(trained, scene)
    kept = graph_bytes(scene, generation.parts, rows=generation.rows or 0)
    most = max(generation.bytes, training.bytes) + kept.total()
    fits = most <= scene.limit * KEEPS_BELOW
    choice = config.rollout.keep_graphs
    keeps = bool(kept) and (choice is When.always or (choice is When.auto and fits))
    if keeps:
        later = {name: parts + kept for name, parts in training.moments.items() if name != BUILDING}
        training = replace(training, moments=training.moments | later)
    seconds = generation.step_seconds | training.step_seconds
    if branches := _branches_per_response(config.ppo, scene.response_tokens):
        # A branch begins, on average, in the middle of a response, and is scored whole.
        seconds["branch"] = branches * (seconds["generate"] / 2 + seconds["score"])
    return replace(
        training,
        rows=generation.rows,
        gathers=generation.gathers,
        keeps_graphs=keeps,
        moments=generation.moments | training.moments,
        step_seconds=seconds,
    )


def _branches_per_response(ppo: PpoConfig, tokens: float) -> float:
    """Return how many branches a step samples for each of its responses of ``tokens`` tokens."""
    found = 0.0
    if ppo.value_targets is ValueTargets.monte_carlo:
        found += math.ceil(tokens / ppo.value_step_tokens) * ppo.value_branches
    check = ppo.critic_check
    if check.every:
        found += check.states * check.branches / check.every / ppo.rollout_batch_size
    return found


def _plan_beside_training(scene: PhaseMemory, like: PhasePlan) -> PhasePlan:
    """Plan PPO with processes of their own that sample while ranks train."""
    machine = scene.at.machine
    own, theirs = divide_cores(scene.config, num_usable_cores())
    ranks = _plan_ppo(_with_cores(scene, own), like)
    process = _plan_sampling_process(_with_cores(scene, theirs), ranks.rows or 0)
    if machine.is_gpu:  # each process has a GPU of its own
        moments = ranks.moments | {"generation beside training": process.parts}
    else:
        samplers = process.bytes * scene.config.rollout.samplers // machine.ranks_per_node
        moments = {
            name: parts if name == BUILDING else parts + Counter(samplers=samplers)
            for name, parts in ranks.moments.items()
        }
    seconds = ranks.step_seconds | process.step_seconds
    return replace(ranks, moments=moments, step_seconds=seconds, overlaps=True)


def _with_cores(scene: PhaseMemory, cores: int) -> PhaseMemory:
    """Return ``scene`` with the rates that a process has on ``cores`` cores of a node's CPU."""
    machine = scene.at.machine
    if machine.is_gpu:
        return scene
    share = cores * machine.ranks_per_node / num_usable_cores()  # rates are those of a rank
    slower = replace(
        machine, operations=machine.operations * share, bandwidth=machine.bandwidth * share
    )
    return replace(scene, at=replace(scene.at, machine=slower))


def _plan_sampling_process(scene: PhaseMemory, rows: int) -> PhasePlan:
    """Plan a process that holds the policy's weights, whole, and samples its share of a step.

    It decodes ``rows`` responses at once, or all of its share if these are all of a rank's.
    """
    rollout, at = rollout_plan(scene.config), scene.at
    share = scene.config.ppo.rollout_batch_size // scene.config.rollout.samplers
    # The highest stage whose weights are whole: the precision of weights depends on the stage.
    stage = min(at.zero.stage, SHARDED_WEIGHTS - 1)
    zero = replace(at.zero, stage=stage, offload_parameters=False)
    process = replace(
        scene,
        at=replace(at, machine=replace(at.machine, ranks=1, nodes=1), zero=zero),
        models=(replace(scene.models[0], trained=0, has_ema=False),),
    )
    rows = share if rows == rollout.per_rank else min(rows, share)
    return _plan_rollout(process, replace(rollout, per_rank=share), rows)


def _candidate_rows(scene: PhaseMemory, rollout: RolloutPlan) -> list[int]:
    """Return the possible numbers of responses to decode at once; generate() decodes all."""
    share, settings = rollout.per_rank, scene.config.rollout
    if settings.backend is Backend.hf:
        return [share]
    if settings.max_rows is not None:
        return [min(settings.max_rows, share)]
    few = range(1, math.isqrt(share - 1) + 2)  # more waves need fewer rows than these
    return sorted({*few, *(math.ceil(share / waves) for waves in few)})


def _plan_rollout(scene: PhaseMemory, rollout: RolloutPlan, rows: int) -> PhasePlan:
    """Plan the rollout of one PPO step with ``rows`` responses decoded at once."""
    config, at, actor = scene.config, scene.at, scene.models[0]
    settings, size = config.rollout, scene.at.bytes_per_weight(scene.models[0])
    # The fast rollout allocates its KV cache for the longest allowed prompts.
    tokens = settings.max_prompt_tokens + config.tokens_after_prompt[1]
    held = 2 * rows if config.environment.is_used else rows  # parked episodes keep their KV cache
    parts = scene.resident_bytes()
    is_sharded = stage_of(actor.role, at.zero) == SHARDED_WEIGHTS
    # A rank of a tensor-parallel group holds all rows of the group, but only its own heads.
    parts["kv_cache"] = memory_model.kv_cache_bytes(
        actor.shape, rows=held, tokens=tokens, size=size
    )
    prefill = min(memory_model.PREFILL_TOKENS, rows * scene.load.longest)
    wide = 4 * actor.shape.hidden + 2 * actor.shape.ffn
    parts["activations"] = prefill * wide * size + rows * actor.shape.vocab * memory_model.SINGLE
    whole = actor.weights * size // tensor_parallel_size(scene)
    gathers = is_sharded and gathers_weights(scene, settings.backend, parts.total() + whole)
    if gathers:
        parts["gathered_weights"] = whole
    if settings.backend is Backend.fast:
        parts["gathered_weights"] += copied_weight_bytes(scene, is_gathered=gathers)
    if not gathers:
        parts["buffers"] += scene.gathered_bytes(actor)
    how = build_sampling(scene, responses=rollout.per_rank, rows=rows, gathers=gathers)
    return PhasePlan(
        phase=Phase.ppo,
        micro_batch=0,
        rows=rows,
        gathers=gathers,
        moments={"generation": parts},
        host=scene.host,
        step_seconds={"generate": time_model.sampling_seconds(at, actor, how)},
        steps=scene.load.steps,
    )


def _plan_training(
    scene: PhaseMemory, rollout: RolloutPlan, learning: BatchPlan, micro: int
) -> PhasePlan:
    """Plan scoring and training of one PPO step with micro-batches of size ``micro``."""
    config, at = scene.config, scene.at
    response = config.tokens_after_prompt[1]
    longest = scene.load.longest + response
    moments = memory_outside_steps(scene) | {
        "scoring": scene.scoring_peak(scene.models, sequences=micro, tokens=longest),
    }
    score, train = 0.0, 0.0
    is_fast = config.rollout.backend is Backend.fast
    reuses = is_fast and config.rollout.reuse_logprobs is not When.never
    updates = config.ppo.ppo_epochs * rollout.mini_batches
    for model in scene.models:
        work = scene.forward_work(
            model, sequences=rollout.per_rank, micro=micro, answer=scene.response_tokens
        )
        readings = _actor_scoring_passes(scene, reuses=reuses) if model.role is Role.actor else 1
        score += readings * time_model.no_grad_pass_seconds(at, model, work)
        if not model.trained:
            continue
        moments[f"training of the {model.role}"] = scene.training_peak(
            model,
            sequences=micro,
            tokens=longest,
            positions=response,
            passes=learning.per_rank // micro + bool(config.ppo.ptx_coef),
        )
        batch = scene.forward_work(
            model, sequences=learning.per_rank, micro=micro, answer=scene.response_tokens
        )
        train += updates * time_model.training_seconds(at, model, batch)
    return PhasePlan(
        phase=Phase.ppo,
        micro_batch=micro,
        moments=moments,
        host=scene.host,
        step_seconds={"score": score, "train": train},
        steps=scene.load.steps,
        other_seconds=seconds_outside_ppo_steps(scene, micro),
    )


def _actor_scoring_passes(scene: PhaseMemory, *, reuses: bool) -> int:
    """Return the number of actor forward passes that score a rollout before training."""
    if scene.config.ppo.shared_trunk:
        return 1  # one pass scores for actor, reference and critic
    is_reference = all(model.role is not Role.reference for model in scene.models)
    return (0 if reuses else 1) + is_reference  # as the reference, the actor runs without adapters
