"""Memory and time of one phase, for given ZeRO settings and micro-batches."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from rlhf.config.checks import BatchPlan, RolloutPlan, phase_plans, rollout_plan
from rlhf.config.choices import Backend, Phase, When
from rlhf.config.roles import SHARDED_WEIGHTS, Role, stage_of
from rlhf.config.schema import RunConfig
from rlhf.planning import memory, timing
from rlhf.planning.machine import GIB
from rlhf.planning.memory import Parts, States
from rlhf.planning.models import ModelUse, models_of
from rlhf.planning.timing import Setting

CUDA_CONTEXT = 0.8 * GIB  # of a process on a GPU, with its libraries' workspaces
CPU_PROCESS = 0.7 * GIB  # of a process with torch, DeepSpeed and transformers loaded
FRAGMENTED = 0.03  # of the memory, lost between blocks


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

    @property
    def bytes(self) -> int:
        """Bytes of one rank at that moment."""
        return self.parts.total()

    @property
    def seconds(self) -> float:
        """Seconds of the phase, or of one step where the steps are not known."""
        return sum(self.step_seconds.values()) * (1 if self.steps is None else self.steps)


@dataclass(frozen=True, kw_only=True)
class Scene:
    """One phase under one ZeRO setting, before its micro-batches are chosen."""

    config: RunConfig
    at: Setting
    phase: Phase
    models: tuple[ModelUse, ...]
    steps: int | None
    states: dict[Role, States] = field(default_factory=dict)

    @classmethod
    def of(cls, config: RunConfig, at: Setting, phase: Phase, steps: int | None) -> Scene:
        """The phase of a configuration, with the states of its models."""
        models, machine = models_of(config, phase), at.machine
        states = {
            model.role: memory.model_states(
                model, zero=at.zero, dtype=machine.dtype, ranks=machine.ranks
            )
            for model in models
        }
        return cls(config=config, at=at, phase=phase, models=models, steps=steps, states=states)

    @property
    def limit(self) -> float:
        """Bytes that one rank may use."""
        return self.at.machine.memory * (1 - FRAGMENTED)

    @property
    def host(self) -> int:
        """Bytes that one rank keeps in the host's memory or on NVMe."""
        return sum(states.host.total() for states in self.states.values())

    def resident(self, *, learning: bool) -> Parts:
        """What is there all the time; gradients while the phase learns."""
        parts: Parts = Counter()
        for states in self.states.values():
            parts += states.device
            if not self.at.machine.is_gpu:  # its memory is the host's
                parts += states.host
        if not learning:
            del parts["gradients"]
        parts["process"] = int(CUDA_CONTEXT if self.at.machine.is_gpu else CPU_PROCESS)
        return parts

    def learning(self, model: ModelUse, *, sequences: int, tokens: int, positions: int) -> Parts:
        """The moment at which ``model`` is trained on one micro-batch."""
        zero, machine, size = self.at.zero, self.at.machine, self.at.size(model)
        kept = memory.activations(
            model,
            sequences=sequences,
            tokens=tokens,
            size=size,
            keeps_scores=not machine.is_gpu,
        )
        return self.resident(learning=True) + Counter(
            activations=kept,
            logits=memory.logits(model, positions=sequences * positions, size=size),
            buffers=memory.buffers(
                model, zero=zero, dtype=machine.dtype, ranks=machine.ranks, training=True
            ),
        )

    def reading(self, models: Iterable[ModelUse], *, sequences: int, tokens: int) -> Parts:
        """The moment at which the models score one micro-batch, one after another."""
        zero, machine = self.at.zero, self.at.machine
        each = [
            Counter(
                activations=memory.reading(
                    model, sequences=sequences, tokens=tokens, size=self.at.size(model)
                ),
                buffers=memory.buffers(
                    model, zero=zero, dtype=machine.dtype, ranks=machine.ranks, training=False
                ),
            )
            for model in models
        ]
        return self.resident(learning=False) + max(each, key=Counter.total)


def divisors(number: int, cap: int) -> list[int]:
    """Its divisors up to ``cap``."""
    return [size for size in range(1, min(cap, number) + 1) if number % size == 0]


def plan_phase(scene: Scene) -> PhasePlan:
    """The fastest micro-batches that fit; where none does, those that take least."""
    if scene.phase is Phase.ppo:
        return _plan_ppo(scene)
    plan = phase_plans(scene.config)[scene.phase]
    options = [_supervised(scene, plan, micro) for micro in _micro_batches(scene, plan)]
    return _best(options, scene.limit)


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
    config, at = scene.config, scene.at
    pair = 2 if scene.phase in (Phase.reward, Phase.dpo) else 1
    tokens = getattr(config, scene.phase.value).max_tokens
    learner, *others = scene.models
    shape = {"sequences": pair * micro, "tokens": tokens}
    moments = {"training": scene.learning(learner, **shape, positions=tokens)}
    if others:
        moments["reference"] = scene.reading(others, **shape)
    passes = plan.per_rank // micro
    seconds = {"train": 0.0, "score": 0.0}
    for model in scene.models:
        work = timing.forward_operations(
            model, sequences=pair * plan.per_rank, tokens=tokens, positions=tokens
        )
        if model.trained:
            seconds["train"] += timing.training_seconds(at, model, work=work, passes=passes)
        else:
            seconds["score"] += timing.reading_seconds(at, model, work=work, passes=passes)
    moment, parts = max(moments.items(), key=lambda item: item[1].total())
    return PhasePlan(
        phase=scene.phase,
        micro_batch=micro,
        rows=None,
        parts=parts,
        moment=moment,
        host=scene.host,
        step_seconds={part: value for part, value in seconds.items() if value},
        steps=scene.steps,
    )


def _plan_ppo(scene: Scene) -> PhasePlan:
    """PPO: rows of the rollout and micro-batches of what follows are chosen each by itself."""
    config = scene.config
    rollout = rollout_plan(config)
    learning = phase_plans(config)[Phase.ppo]
    sampled = [_sampling(scene, rollout, rows) for rows in _rows(scene, rollout)]
    trained = [_learning(scene, rollout, learning, m) for m in _micro_batches(scene, learning)]
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
        steps=scene.steps,
    )


def _rows(scene: Scene, rollout: RolloutPlan) -> list[int]:
    """How many responses may be decoded at once."""
    chosen = scene.config.rollout.max_rows
    if chosen is not None:
        return [min(chosen, rollout.per_rank)]
    share = rollout.per_rank
    return sorted({math.ceil(share / waves) for waves in range(1, share + 1)})


def _sampling(scene: Scene, rollout: RolloutPlan, rows: int) -> PhasePlan:
    """The rollout of one step."""
    config, at, actor = scene.config, scene.at, scene.models[0]
    settings, size = config.rollout, scene.at.size(scene.models[0])
    tokens = settings.max_prompt_tokens + settings.max_response_tokens
    is_hybrid = settings.backend is Backend.hybrid_engine
    tp = settings.hybrid_engine.inference_tp_size if is_hybrid else 1
    parts = scene.resident(learning=False)
    is_sharded = stage_of(actor.role, at.zero) == SHARDED_WEIGHTS
    # Rows of a group of tensor-parallel ranks are all on each of them, a part of the heads each.
    parts["kv_cache"] = memory.kv_cache(actor.shape, rows=rows, tokens=tokens, size=size)
    prefill = min(memory.PREFILL_TOKENS, rows * settings.max_prompt_tokens)
    wide = 4 * actor.shape.hidden + 2 * actor.shape.ffn
    parts["activations"] = prefill * wide * size + rows * actor.shape.vocab * memory.SINGLE
    whole = actor.weights * size // tp
    gathers = is_sharded and _gathers(scene, settings.backend, parts.total() + whole)
    copies = not at.machine.is_gpu and settings.backend is Backend.fast
    if gathers or copies:
        parts["gathered_weights"] = whole
    how = timing.Sampling(
        responses=rollout.per_rank,
        rows=rows,
        prompt_tokens=settings.max_prompt_tokens,
        response_tokens=settings.max_response_tokens,
        tensor_parallel=tp,
        gathers=gathers,
        layer_factor=HF_LAYER_FACTOR if settings.backend is Backend.hf else 1.0,
    )
    return PhasePlan(
        phase=Phase.ppo,
        micro_batch=0,
        rows=rows,
        gathers=gathers,
        parts=parts,
        moment="generation",
        host=scene.host,
        step_seconds={"generate": timing.sampling_seconds(at, actor, how)},
        steps=scene.steps,
    )


HF_LAYER_FACTOR = 6.0  # generate launches its operations one by one


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
    tokens = config.rollout.max_prompt_tokens + response
    moments = {"scoring": scene.reading(scene.models, sequences=micro, tokens=tokens)}
    score, train = 0.0, 0.0
    reuses = config.rollout.backend is Backend.fast and (
        config.rollout.reuse_logprobs is not When.never
    )
    updates = config.ppo.ppo_epochs * rollout.mini_batches
    for model in scene.models:
        work = timing.forward_operations(
            model, sequences=rollout.per_rank, tokens=tokens, positions=response
        )
        passes = rollout.per_rank // micro or 1
        if not (model.role is Role.actor and reuses):
            score += timing.reading_seconds(at, model, work=work, passes=passes)
        if not model.trained:
            continue
        moments[f"training of the {model.role}"] = scene.learning(
            model, sequences=micro, tokens=tokens, positions=response
        )
        each = timing.training_seconds(
            at, model, work=work / rollout.mini_batches, passes=learning.per_rank // micro
        )
        train += updates * each
    moment, parts = max(moments.items(), key=lambda item: item[1].total())
    return PhasePlan(
        phase=Phase.ppo,
        micro_batch=micro,
        rows=None,
        parts=parts,
        moment=moment,
        host=scene.host,
        step_seconds={"score": score, "train": train},
        steps=scene.steps,
    )
