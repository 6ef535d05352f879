"""Plan a whole run: the memory of each phase, whether the run fits, its duration and price.

``plan_and_configure`` writes the choices of a plan into the configuration of the run.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from operator import attrgetter
from typing import NamedTuple

from rlhf.base.cpu import Isa, usable_isa
from rlhf.base.errors import ConfigError
from rlhf.base.packaged_yaml import read_yaml_beside
from rlhf.config.batches import batch_plans
from rlhf.config.choices import Device, Dtype, ModelInit, Phase, PlanMode, When
from rlhf.config.machine_rates import GIB, Machine, machine_of, typical_rates
from rlhf.config.roles import SHARDED_WEIGHTS, Role, stage_of
from rlhf.config.schema.run import RunConfig
from rlhf.config.validation import validate
from rlhf.models.model_uses import ModelUse, costs_of_methods, models_in_phase
from rlhf.models.shapes import UnknownModelError
from rlhf.options import Backend
from rlhf.plan.advice import describe_idle_options, find_fitting_overrides, zero_candidates
from rlhf.plan.memory_model import SINGLE, MemorySetting
from rlhf.plan.phase_costs import plan_phase
from rlhf.plan.phase_memory import PhaseMemory
from rlhf.plan.phase_plan import PhasePlan, leaves_room, select_fastest
from rlhf.plan.steps import Loads, assume_loads
from rlhf.plan.time_model import CostModel, Efficiency

RATES: Mapping[str, Mapping[str, float]] = read_yaml_beside(__file__, "efficiency.yaml")
EFFICIENCY = {device: Efficiency(**RATES[device]) for device in Device}
START_SECONDS = 4.0  # seconds on a CPU to import libraries and to warm up
RECORD_SECONDS = 6e-5  # seconds on a CPU to read, split and tokenize one example
# Adding up the gradients of n micro-batches in bf16 rounds their sum by about ROUNDED * sqrt(n):
# measured with random gradients, 0.4 % of 8, 1.1 % of 128 and 3.2 % of 1,024.
ROUNDED = 0.001
MANY_PASSES = 256  # micro-batches per step; the plan warns from this number on
HOST_RESERVED = 0.1  # share of the host's memory for the system, the data and files being read
HOST_PROCESS = 2 * GIB  # bytes of a rank's process in the host's memory, with CUDA: an estimate


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A plan of a run under one ZeRO setting."""

    asked: RunConfig
    """The configuration as composed, before planning."""
    loads: Loads | None
    """The steps and lengths of the data that was read; None if it was not read."""
    config: RunConfig
    """The composed configuration with the ZeRO setting of this plan."""
    machine: Machine
    models: dict[Phase, tuple[ModelUse, ...]]
    phases: tuple[PhasePlan, ...]
    records: int
    """Number of examples of the whole run; 0 if unknown."""
    limit: float
    """Bytes that one rank may use."""

    @property
    def warnings(self) -> tuple[str, ...]:
        """Return a sentence for each thing that the user should know before the run starts."""
        sentences = [text for phase in self.phases for text in self._warn_of_phase(phase)]
        if self.fits and not self.is_roomy:
            remedy = "hardware.on_oom=reduce_micro_batch continues when memory runs out"
            if overrides := "; ".join(self.roomier_overrides):
                remedy = f"To free memory: {overrides}"
            sentences.append(
                f"memory is nearly full ({self.peak_bytes / GIB:.1f} of {self.limit / GIB:.1f} GiB)"
                f", and runs have taken up to 7 % more than planned. {remedy}"
            )
        return tuple(sentences)

    def _warn_of_phase(self, phase: PhasePlan) -> Iterator[str]:
        config, seconds = self.config, sum(phase.step_seconds.values())
        limit, minutes = config.launcher.watchdog_minutes, seconds / 60
        if limit is not None and minutes > limit:
            yield (
                f"launcher.watchdog_minutes={limit:g}: a step of {phase.phase} takes about "
                f"{minutes:.0f} minutes, and the run ends if a part of a step takes more than "
                f"{limit:g} minutes. Set launcher.watchdog_minutes={2 * minutes:.0f}"
            )
        learner = self.models[phase.phase][0].role
        passes = batch_plans(config)[phase.phase].per_rank // phase.micro_batch
        adds_in_bf16 = self.machine.dtype is Dtype.bf16 and stage_of(learner, config.zero) > 0
        if adds_in_bf16 and passes >= MANY_PASSES:
            yield (
                f"{phase.phase} adds the gradients of {passes} micro-batches in bf16, which rounds "
                f"their sum by about {ROUNDED * math.sqrt(passes):.1%}; for larger micro-batches "
                "set model.gradient_checkpointing=true or use more ranks, or add them in fp32 with "
                "zero=stage0"
            )
        rollout, is_sharded = config.rollout, stage_of(learner, config.zero) == SHARDED_WEIGHTS
        is_open = rollout.backend is Backend.fast and rollout.gather_weights is When.auto
        samples = phase.phase is Phase.ppo and self.machine.is_gpu and self.machine.ranks > 1
        if samples and is_sharded and is_open and not phase.gathers:
            yield (
                "the actor does not fit whole on one rank, so ppo gathers its weights for every "
                f"token: generation takes {phase.step_seconds['generate']:.0f} of the "
                f"{seconds:.0f} s of a step. A server of several GPUs samples it faster: "
                f"rollout={Backend.vllm_server} with rollout.server.gpus=N plans it, and vLLM's "
                "--tensor-parallel-size=N starts it (docs/rollouts.md)"
            )

    @cached_property
    def misfit_reason(self) -> str | None:
        """Return the reason why the run does not fit, or None if it fits."""
        for phase in self.phases:
            if phase.peak_bytes > self.limit:
                return (
                    f"{phase.phase} needs {phase.peak_bytes / GIB:.1f} GiB on each rank "
                    f"({phase.peak_moment}) and {self.limit / GIB:.1f} can be used"
                )
        offloaded = 0 if self.config.zero.nvme_path else self.offloaded_bytes
        loaded, processes = self.loaded_bytes, HOST_PROCESS * self.machine.ranks_per_node
        host, room = offloaded + loaded + processes, self.machine.host_memory_of_node
        if host > room * (1 - HOST_RESERVED) and self.machine.is_gpu:
            return (
                f"a node's memory must hold {host / GIB:.0f} GiB ({offloaded / GIB:.0f} offloaded, "
                f"{loaded / GIB:.0f} while a model is loaded, {processes / GIB:.0f} for "
                f"processes), and {room * (1 - HOST_RESERVED) / GIB:.0f} can be used "
                f"({1 - HOST_RESERVED:.0%} of hardware.host_memory_gib={room / GIB:.0f})"
            )
        return None

    @property
    def loaded_bytes(self) -> int:
        """Return the bytes of a node's memory while its ranks build their largest model in fp32.

        These are models with random weights, and with adapters that are merged. Others are read
        from the file piece by piece.
        """
        config, at = self.config, MemorySetting(machine=self.machine, zero=self.config.zero)

        def is_whole(model: ModelUse) -> bool:
            start = config.reward_model if model.is_scorer else config.model
            is_random = start.init is ModelInit.random
            return at.runs_on_torch(model) and (is_random or config.lora.rank > 0)

        models = (model for models in self.models.values() for model in models)
        whole = max((model.weights for model in models if is_whole(model)), default=0)
        return SINGLE * whole * self.machine.ranks_per_node

    @property
    def offloaded_bytes(self) -> int:
        """Return the bytes that a node's ranks offload, in the phase that offloads most."""
        return max(phase.host for phase in self.phases) * self.machine.ranks_per_node

    @property
    def fits(self) -> bool:
        """Return True if every phase fits into the memory of every rank and its host."""
        return self.misfit_reason is None

    @property
    def peak_bytes(self) -> int:
        """Return the peak bytes of one rank over all phases."""
        return max(phase.peak_bytes for phase in self.phases)

    @property
    def seconds(self) -> float:
        """Return the seconds of start and phases; a phase of unknown length counts as one step."""
        start = 0.0 if self.machine.is_gpu else START_SECONDS + self.records * RECORD_SECONDS
        return start + sum(phase.seconds for phase in self.phases)

    @property
    def hours(self) -> float | None:
        """Return the hours of the run, or None if the steps of a phase are unknown."""
        if any(phase.steps is None for phase in self.phases):
            return None
        return self.seconds / 3600

    @property
    def price(self) -> float | None:
        """Return the price in US dollars, or None if the time or hourly price is unknown."""
        hours, per_hour, rollout = self.hours, self.machine.price_per_hour, self.config.rollout
        if hours is None or per_hour is None:
            return None
        is_server = Phase.ppo in self.models and rollout.backend is Backend.vllm_server
        extra = (rollout.server.gpus or 0) / self.machine.ranks if is_server else 0.0
        return hours * per_hour * (1 + extra)

    @property
    def is_roomy(self) -> bool:
        """Return True if the run fits even if it takes somewhat more memory than planned."""
        return self.fits and leaves_room(self, self.machine)

    @cached_property
    def fitting_overrides(self) -> list[str]:
        """Return overrides that make the run fit; cached, because every override is planned."""
        if self.fits:
            return []
        return find_fitting_overrides(self.asked, partial(plan_run, loads=self.loads))

    @cached_property
    def roomier_overrides(self) -> list[str]:
        """Return overrides with which the plan leaves room on every GPU."""
        planner = partial(plan_run, loads=self.loads)
        return find_fitting_overrides(self.asked, planner, attrgetter("is_roomy"))

    @property
    def zero_text(self) -> str:
        """Return the ZeRO setting as text, such as "ZeRO stage 2, optimiser offloaded"."""
        zero = self.config.zero
        differs = self.zero_stages.get(Role.critic, zero.stage) != zero.stage
        critic = f" (critic: stage {zero.critic_stage})" if differs else ""
        offloaded = {
            "optimiser": zero.offload_optimizer,
            "weights": zero.offload_parameters,
            "reference": zero.offload_reference and Role.reference in self.roles,
            "reward model": zero.offload_reward and Role.reward in self.roles,
            "moving average": zero.offload_ema and self.config.ppo.ema_beta > 0,
        }
        names = [name for name, is_offloaded in offloaded.items() if is_offloaded]
        offloads = f", {' and '.join(names)} offloaded" if names else ""
        return f"ZeRO stage {zero.stage}{critic}{offloads}"

    @property
    def zero_stages(self) -> dict[str, int]:
        """Return the ZeRO stage of every model in the run, by role."""
        return {role.value: stage_of(role, self.config.zero) for role in Role if role in self.roles}

    @property
    def roles(self) -> set[Role]:
        """Return the roles of the models of all phases."""
        return {model.role for models in self.models.values() for model in models}

    @property
    def saved_model_bytes(self) -> int:
        """Return the bytes on disk of the saved models, and of their copies such as averages."""
        at = MemorySetting(machine=self.machine, zero=self.config.zero)
        return sum(
            model.weights * at.bytes_per_weight(model) * (1 + len(model.fp32_copies))
            for models in self.models.values()
            for model in models
            if model.trained
        )

    @property
    def checkpoint_bytes(self) -> int:
        """Return the bytes of the largest phase's checkpoints: those kept, and one being written.

        A checkpoint has, for every trained weight, the fp32 weight, two moments and all copies, and
        the fp32 weights of a frozen model that an option changes.
        """
        config = self.asked.checkpoint
        if not (config.every_minutes or config.every_steps or config.best):
            return 0
        count = config.keep + (config.best is not None) + 1
        return count * max(
            sum(
                4 * model.trained * (3 + len(model.fp32_copies))
                + 4 * model.weights * model.is_stored
                for model in models
            )
            for models in self.models.values()
        )


def plan_run(
    config: RunConfig, loads: Loads | None = None, *, finished: Container[Phase] = ()
) -> Plan:
    """Return the plan of a run, without the ``finished`` phases.

    With zero.auto, this is the fastest plan that fits or, if none fits, the plan with least memory.
    ``loads`` are the steps and lengths of the data; without them, every length is the maximum.

    Raises:
        ConfigError: if a rule refuses every ZeRO setting of zero.auto.
        UnknownModelError: if the shape of a model is not known.
    """
    # Choose micro-batches with typical rates, then predict times with measured rates. Measured
    # rates vary from day to day; with other micro-batches the same seed would give another run.
    typical = machine_of(config.hardware, typical_rates())
    machine = machine_of(config.hardware)
    phase_loads = assume_loads(config) if loads is None else loads
    # Models are the same under all ZeRO settings; build them once, as shapes may come from files.
    order = [phase for phase in config.phase.order if phase not in finished]
    models = {phase: models_in_phase(config, phase) for phase in order}

    def build_plan(candidate: RunConfig, machine: Machine, earlier: Plan | None = None) -> Plan:
        shares = efficiency_of(machine)
        if config.rollout.backend is Backend.hybrid_engine:
            from rlhf.options.hybrid_engine.costs import DEEPSPEED_CHAT

            shares = replace(shares, **DEEPSPEED_CHAT)
        at = CostModel(
            machine=machine,
            zero=candidate.zero,
            efficiency=shares,
            methods=tuple(costs_of_methods(config)),
        )
        scenes = [
            PhaseMemory(
                config=candidate, at=at, phase=phase, models=models[phase], load=phase_loads[phase]
            )
            for phase in order
        ]
        choices = earlier.phases if earlier else [None] * len(scenes)
        return Plan(
            asked=config,
            loads=loads,
            config=candidate,
            machine=machine,
            models=models,
            phases=tuple(map(plan_phase, scenes, choices)),
            records=max(load.records for load in phase_loads.values()),
            limit=scenes[0].memory_limit,
        )

    best = select_best_plan(
        [build_plan(candidate, typical) for candidate in zero_candidates(config, typical)]
    )
    return build_plan(best.config, machine, earlier=best)


def efficiency_of(machine: Machine) -> Efficiency:
    """Return the shares of the peak rates that ``machine`` reaches."""
    shares = EFFICIENCY[Device.cuda if machine.is_gpu else Device.cpu]
    if (share := machine.training_share) is not None:
        scoring = min(1.0, share * shares.scoring / shares.training)
        shares = replace(shares, training=share, scoring=scoring)
    is_compiled = machine.dtype in {Dtype.bf16, Dtype.fp32} and usable_isa() >= Isa.avx2
    if is_compiled and not machine.is_gpu:
        return replace(shares, **RATES["compiled_decoding"])
    return shares


def select_best_plan(plans: Sequence[Plan]) -> Plan:
    """Return the first of the fastest plans that fit; if none fits, the plan with least memory."""
    if fitting := [plan for plan in plans if plan.fits]:
        return select_fastest(fitting, fitting[0].machine)[0]
    return min(plans, key=lambda plan: plan.peak_bytes)


class Decision(NamedTuple):
    """The result of planning: the configuration to run, its plan, and ``notes`` to print.

    The notes are the plan's warnings, or why there is no plan, and options without effect.
    """

    config: RunConfig
    plan: Plan | None
    notes: tuple[str, ...] = ()


def plan_and_configure(
    config: RunConfig, loads: Loads | None = None, *, finished: Container[Phase] = ()
) -> Decision:
    """Plan a run without its ``finished`` phases; write the plan's choices into its configuration.

    Raises:
        ConfigError: if plan=check and the run does not fit, if plan=only and a model has an unknown
            shape, or if the resulting configuration is invalid.
    """
    if config.plan is PlanMode.off:
        return Decision(config, None, tuple(describe_idle_options(config)))
    try:
        plan = plan_run(config, loads, finished=finished)
    except UnknownModelError as error:
        if config.plan is PlanMode.only:
            raise ConfigError(
                f"plan=only: {error}; name model and reward_model by their sizes, as in "
                "model=opt_13b, or by a folder with a config.json"
            ) from error
        reason = f"no plan of memory and time: {error}"
        return Decision(config, None, (reason, *describe_idle_options(config)))
    if config.plan is PlanMode.check and not plan.fits:
        overrides = "; ".join(plan.fitting_overrides)
        known = f"what fits: {overrides}" if overrides else "the planner finds no change that fits"
        raise ConfigError(
            f"{plan.misfit_reason}; {known}. plan=only shows the plan, plan=off skips this check"
        )
    config = resolve_auto(plan)
    validate(config)
    return Decision(config, plan, (*plan.warnings, *describe_idle_options(config)))


def resolve_auto(plan: Plan) -> RunConfig:
    """Return the plan's configuration, with the plan's choices instead of ``auto`` and null."""
    config = plan.config
    for phase in plan.phases:
        name = phase.phase.value
        settings = replace(getattr(config, name), micro_batch_size=phase.micro_batch)
        config = replace(config, **{name: settings})
        if phase.phase is not Phase.ppo:
            continue
        rollout = config.rollout
        share = config.ppo.rollout_batch_size // plan.machine.ranks
        if rollout.max_rows is None and phase.rows is not None and phase.rows < share:
            rollout = replace(rollout, max_rows=phase.rows)
        is_sharded = stage_of(Role.actor, plan.config.zero) == SHARDED_WEIGHTS
        is_open = rollout.gather_weights is When.auto and rollout.backend is Backend.fast
        if is_sharded and is_open:
            choice = When.always if phase.gathers else When.never
            rollout = replace(rollout, gather_weights=choice)
        if rollout.keep_graphs is When.auto:
            choice = When.always if phase.keeps_graphs else When.never
            rollout = replace(rollout, keep_graphs=choice)
        config = replace(config, rollout=rollout)
    return config
