"""Memory and time of one phase, for given ZeRO settings and micro-batches."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from rlhf.config.checks import BatchPlan, RolloutPlan, phase_plans, rollout_plan
from rlhf.config.choices import Backend, Phase, When
from rlhf.config.roles import SHARDED_WEIGHTS, Role, stage_of
from rlhf.planning import memory, timing
from rlhf.planning.memory import Parts
from rlhf.planning.outside_steps import around_ppo, around_training, how_sampled, tensor_parallel
from rlhf.planning.scene import Scene


@dataclass(frozen=True, kw_only=True)
class PhasePlan:
    """What one phase takes of every rank."""

    phase: Phase
    micro_batch: int
    """Sequences at once; pairs in the reward and dpo phases."""
    rows: int | None
    """Responses decoded at once, in PPO."""
    gathers: bool = False
    """Whether sharded weights are made whole for a rollout."""
    parts: Parts
    """Bytes at the moment that takes most, by what they are for."""
    moment: str
    """That moment."""
    host: int
    """Bytes that one rank keeps in the host's memory, or on NVMe."""
    step_seconds: dict[str, float]
    """Seconds of one step by what it does."""
    steps: int | None
    """Steps of the phase; None where the examples cannot be counted."""
    other_seconds: dict[str, float] = field(default_factory=dict)
    """Seconds of the whole phase outside its steps, by what they are for."""

    @property
    def bytes(self) -> int:
        """Bytes of one rank at that moment."""
        return self.parts.total()

    @property
    def seconds(self) -> float:
        """Seconds of the phase, or of one step where the steps are not known."""
        if self.steps is None:
            return sum(self.step_seconds.values())
        return sum(self.step_seconds.values()) * self.steps + sum(self.other_seconds.values())


def divisors(number: int, cap: int) -> list[int]:
    """Its divisors up to ``cap``."""
    return [size for size in range(1, min(cap, number) + 1) if number % size == 0]


def plan_phase(scene: Scene, like: PhasePlan | None = None) -> PhasePlan:
    """Return the plan with the fastest micro-batches that fit, or else with those that take least.

    With ``like`` nothing is chosen: the micro-batches and rows are those of that plan.
    """
    if scene.phase is Phase.ppo:
        return _plan_ppo(scene, like)
    plan = phase_plans(scene.config)[scene.phase]
    sizes = [like.micro_batch] if like else _micro_batches(scene, plan)
    return _best([_supervised(scene, plan, micro) for micro in sizes], scene.limit)


def _best(options: Sequence[PhasePlan], limit: float) -> PhasePlan:
    """The fastest that fits, the larger micro-batch where two are as fast."""
    fitting = [option for option in options if option.bytes <= limit]
    if not fitting:
        return min(options, key=lambda option: option.bytes)
    return min(fitting, key=lambda option: (option.seconds, -option.micro_batch))


def _micro_batches(scene: Scene, plan: BatchPlan) -> list[int]:
    config, phase = scene.config, scene.phase
    chosen = getattr(config, phase.value).micro_batch_size
    if chosen is not None:
        return [plan.micro]
    pair = 2 if phase in (Phase.reward, Phase.dpo) else 1
    return divisors(plan.per_rank, max(1, config.hardware.max_micro_batch_size // pair))


def _supervised(scene: Scene, plan: BatchPlan, micro: int) -> PhasePlan:
    """SFT, reward model or DPO with micro-batches of this size."""
    at = scene.at
    pair = 2 if scene.phase in (Phase.reward, Phase.dpo) else 1
    longest = scene.load.longest
    learner, *others = scene.models
    shape = {"sequences": pair * micro, "tokens": longest}
    moments = {"training": scene.learning(learner, **shape, positions=longest)}
    if others:
        moments["reference"] = scene.reading(others, **shape)
    seconds = {"train": 0.0, "score": 0.0}
    for model in scene.models:
        work = scene.work(model, sequences=pair * plan.per_rank, micro=pair * micro)
        if model.trained:
            seconds["train"] += timing.training_seconds(at, model, work)
        # Without its adapters DPO's learner is its own reference.
        if not model.trained or (scene.phase is Phase.dpo and not others):
            seconds["score"] += timing.reading_seconds(at, model, work)
    moment, parts = max(moments.items(), key=lambda item: item[1].total())
    return PhasePlan(
        phase=scene.phase,
        micro_batch=micro,
        rows=None,
        parts=parts,
        moment=moment,
        host=scene.host,
        step_seconds={part: value for part, value in seconds.items() if value},
        steps=scene.load.steps,
        other_seconds=around_training(scene, pair * micro),
    )


def _plan_ppo(scene: Scene, like: PhasePlan | None) -> PhasePlan:
    """PPO: rows of the rollout and micro-batches of what follows are chosen each by itself."""
    config = scene.config
    rollout = rollout_plan(config)
    learning = phase_plans(config)[Phase.ppo]
    counts = [like.rows] if like and like.rows else _rows(scene, rollout)
    sizes = [like.micro_batch] if like else _micro_batches(scene, learning)
    sampled = [_sampling(scene, rollout, rows) for rows in counts]
    trained = [_learning(scene, rollout, learning, micro) for micro in sizes]
    generation, training = _best(sampled, scene.limit), _best(trained, scene.limit)
    larger = max(generation, training, key=lambda plan: plan.bytes)
    return PhasePlan(
        phase=Phase.ppo,
        micro_batch=training.micro_batch,
        rows=generation.rows,
        gathers=generation.gathers,
        parts=larger.parts,
        moment=larger.moment,
        host=scene.host,
        step_seconds=generation.step_seconds | training.step_seconds,
        steps=scene.load.steps,
        other_seconds=around_ppo(scene, training.micro_batch),
    )


def _rows(scene: Scene, rollout: RolloutPlan) -> list[int]:
    """How many responses may be decoded at once; generate takes all of them."""
    share, settings = rollout.per_rank, scene.config.rollout
    if settings.backend is Backend.hf:
        return [share]
    if settings.max_rows is not None:
        return [min(settings.max_rows, share)]
    return sorted({math.ceil(share / waves) for waves in range(1, share + 1)})


def _sampling(scene: Scene, rollout: RolloutPlan, rows: int) -> PhasePlan:
    """The rollout of one step."""
    config, at, actor = scene.config, scene.at, scene.models[0]
    settings, size = config.rollout, scene.at.size(scene.models[0])
    # The fast loop allocates its cache for the longest prompts that may come.
    tokens = settings.max_prompt_tokens + settings.max_response_tokens
    parts = scene.resident(learning=False)
    is_sharded = stage_of(actor.role, at.zero) == SHARDED_WEIGHTS
    # Rows of a group of tensor-parallel ranks are all on each of them, a part of the heads each.
    parts["kv_cache"] = memory.kv_cache(actor.shape, rows=rows, tokens=tokens, size=size)
    prefill = min(memory.PREFILL_TOKENS, rows * scene.load.longest)
    wide = 4 * actor.shape.hidden + 2 * actor.shape.ffn
    parts["activations"] = prefill * wide * size + rows * actor.shape.vocab * memory.SINGLE
    whole = actor.weights * size // tensor_parallel(scene)
    gathers = is_sharded and _gathers(scene, settings.backend, parts.total() + whole)
    copies = not at.machine.is_gpu and settings.backend is Backend.fast
    if gathers or copies:
        parts["gathered_weights"] = whole
    if not gathers:
        parts["buffers"] += scene.live(actor)
    how = how_sampled(scene, responses=rollout.per_rank, rows=rows, gathers=gathers)
    return PhasePlan(
        phase=Phase.ppo,
        micro_batch=0,
        rows=rows,
        gathers=gathers,
        parts=parts,
        moment="generation",
        host=scene.host,
        step_seconds={"generate": timing.sampling_seconds(at, actor, how)},
        steps=scene.load.steps,
    )


def _gathers(scene: Scene, backend: Backend, needed: int) -> bool:
    """Whether sharded weights are made whole for a rollout."""
    match backend:
        case Backend.hf:
            return False
        case Backend.hybrid_engine:
            return True
        case _:
            choice = scene.config.rollout.gather_weights
            return choice is When.always or (choice is When.auto and needed <= scene.limit)


def _learning(scene: Scene, rollout: RolloutPlan, learning: BatchPlan, micro: int) -> PhasePlan:
    """Scoring and training of one step."""
    config, at = scene.config, scene.at
    response = config.rollout.max_response_tokens
    longest = scene.load.longest + response
    moments = {"scoring": scene.reading(scene.models, sequences=micro, tokens=longest)}
    score, train = 0.0, 0.0
    reuses = config.rollout.backend is Backend.fast and (
        config.rollout.reuse_logprobs is not When.never
    )
    updates = config.ppo.ppo_epochs * rollout.mini_batches
    for model in scene.models:
        work = scene.work(model, sequences=rollout.per_rank, micro=micro, answer=scene.answer)
        readings = _readings(scene, reuses=reuses) if model.role is Role.actor else 1
        score += readings * timing.reading_seconds(at, model, work)
        if not model.trained:
            continue
        moments[f"training of the {model.role}"] = scene.learning(
            model, sequences=micro, tokens=longest, positions=response
        )
        batch = scene.work(model, sequences=learning.per_rank, micro=micro, answer=scene.answer)
        train += updates * timing.training_seconds(at, model, batch)
    moment, parts = max(moments.items(), key=lambda item: item[1].total())
    return PhasePlan(
        phase=Phase.ppo,
        micro_batch=micro,
        rows=None,
        parts=parts,
        moment=moment,
        host=scene.host,
        step_seconds={"score": score, "train": train},
        steps=scene.load.steps,
    )


def _readings(scene: Scene, *, reuses: bool) -> int:
    """Passes of the actor over a rollout before it learns from it."""
    if scene.config.ppo.shared_trunk:
        return 1  # for actor, reference and critic at once
    is_reference = all(model.role is not Role.reference for model in scene.models)
    return (0 if reuses else 1) + is_reference  # without its adapters
