"""A plan of a whole run: what each phase takes, whether it fits, how long and for how much."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from typing import Any

from rlhf.config.choices import Device, Dtype, Phase
from rlhf.config.feature_checks import check_engine, check_rollout, check_zero
from rlhf.config.machine_schema import ZeroConfig
from rlhf.config.roles import SHARDED_WEIGHTS, Role, stage_of
from rlhf.config.schema import RunConfig
from rlhf.cpu import Isa, usable_isa
from rlhf.errors import ConfigError
from rlhf.planning.cpu_rates import typical_rates
from rlhf.planning.machine import GIB, Machine, machine_of
from rlhf.planning.memory import weight_bytes
from rlhf.planning.models import ModelUse, models_of
from rlhf.planning.phases import PhasePlan, plan_phase
from rlhf.planning.scene import Scene
from rlhf.planning.timing import Efficiency, Setting
from rlhf.planning.workload import Loads, assumed_loads

# Shares of the peaks. On GPUs fitted to table 1 of DeepSpeed-Chat's announcement, on CPUs to runs
# of this project on an EPYC with AVX512-BF16 (docs/planner.md).
EFFICIENCY = {
    Device.cuda: Efficiency(
        matmul=0.23,
        sharded=0.65,
        bandwidth=0.4,
        attention=0.4,
        link=0.3,
        layer_seconds=30e-6,
        message_seconds=650e-6,
    ),
    Device.cpu: Efficiency(
        matmul=0.8,
        sharded=1.0,
        bandwidth=0.85,
        attention=0.05,
        link=0.5,
        layer_seconds=0.0,
        message_seconds=100e-6,
        touches=12.0,
        layer_calls=450.0,
        decode_calls=80.0,
    ),
}
START_SECONDS = 11.0  # until libraries are imported, data is read, and all has run once
AMX_ATTENTION = 0.35  # the share of the bandwidth that the kernel's attention reaches
HOST_RESERVED = 0.1  # of the host's memory: the system, data, files that are being read


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A run under one ZeRO setting."""

    asked: RunConfig
    """The configuration as it was composed."""
    loads: Loads | None
    """Its data as it was read; None if it was not."""
    config: RunConfig
    """The same with the ZeRO setting of the plan."""
    machine: Machine
    models: dict[Phase, tuple[ModelUse, ...]]
    phases: tuple[PhasePlan, ...]
    limit: float
    """Bytes that one rank may use."""

    @property
    def zero(self) -> ZeroConfig:
        """The ZeRO setting."""
        return self.config.zero

    @cached_property
    def reason(self) -> str | None:
        """Why it does not fit; None where it does."""
        for phase in self.phases:
            if phase.bytes > self.limit:
                return (
                    f"{phase.phase} needs {phase.bytes / GIB:.1f} GiB on each rank "
                    f"({phase.moment}) and {self.limit / GIB:.1f} can be used"
                )
        host = max(phase.host for phase in self.phases) * self.machine.ranks_per_node
        room = self.machine.host_memory_of_node * (1 - HOST_RESERVED)
        if host > room and self.zero.nvme_path is None and self.machine.is_gpu:
            return (
                f"what is offloaded takes {host / GIB:.0f} GiB of a node's memory, "
                f"and {room / GIB:.0f} can be used"
            )
        return None

    @property
    def fits(self) -> bool:
        """Whether every phase fits into every rank and its host."""
        return self.reason is None

    @property
    def seconds(self) -> float:
        """Seconds of all phases and of the start; without known steps a phase counts with one."""
        start = 0.0 if self.machine.is_gpu else START_SECONDS
        return start + sum(phase.seconds for phase in self.phases)

    @property
    def hours(self) -> float | None:
        """Hours of all phases; None where the steps of one are not known."""
        if any(phase.steps is None for phase in self.phases):
            return None
        return self.seconds / 3600

    @property
    def price(self) -> float | None:
        """US dollars; None where time or price is not known."""
        hours, per_hour = self.hours, self.machine.price_per_hour
        return None if hours is None or per_hour is None else hours * per_hour

    @cached_property
    def ways(self) -> list[str]:
        """What would make it fit (rlhf/planning/advice.py), found once: it plans many times."""
        from rlhf.planning.advice import advice  # which plans, and so needs this module

        return [] if self.fits else advice(self)

    @property
    def stages(self) -> dict[str, int]:
        """ZeRO stage of every model of the last phase that has it."""
        return {role.value: stage_of(role, self.zero) for role in Role if role in self.roles}

    @property
    def roles(self) -> set[Role]:
        """What the models of all phases do."""
        return {model.role for models in self.models.values() for model in models}

    @property
    def disk(self) -> int:
        """Bytes of the models that the run leaves."""
        total = 0
        for models in self.models.values():
            for model in models:
                if model.trained:
                    size = weight_bytes(model.role, self.zero, self.machine.dtype)
                    total += model.weights * size * (2 if model.has_ema else 1)
        return total


def plan_run(
    config: RunConfig, loads: Loads | None = None, efficiency: Efficiency | None = None
) -> Plan:
    """The plan of a configuration; with zero.auto the fastest that fits, else least memory.

    ``loads`` describe the data as it was read; without them its sequences count as long as they
    may be.

    Raises:
        UnknownModelError: the shape of a model is not known.
    """
    # Typical rates choose and measured ones predict: measurements differ from day to day, and other
    # micro-batches sum in another order, so that a seed would not give the same run again.
    typical = machine_of(config.hardware, typical_rates())
    machine = machine_of(config.hardware)
    found = assumed_loads(config) if loads is None else loads
    # Once for all candidates: no ZeRO setting changes them, and their shapes may come from files.
    models = {phase: models_of(config, phase) for phase in config.phase.order}

    def plan(candidate: RunConfig, machine: Machine, like: Plan | None = None) -> Plan:
        shares = efficiency or efficiency_of(machine)
        at = Setting(machine=machine, zero=candidate.zero, efficiency=shares)
        scenes = [
            Scene.of(candidate, at, phase, found[phase], models[phase])
            for phase in config.phase.order
        ]
        choices = like.phases if like else [None] * len(scenes)
        return Plan(
            asked=config,
            loads=loads,
            config=candidate,
            machine=machine,
            models=models,
            phases=tuple(map(plan_phase, scenes, choices)),
            limit=scenes[0].limit,
        )

    best = best_of([plan(candidate, typical) for candidate in _candidates(config, typical)])
    return best if machine == typical else plan(best.config, machine, like=best)


def efficiency_of(machine: Machine) -> Efficiency:
    """The shares of its peaks that ``machine`` reaches."""
    found = EFFICIENCY[Device.cuda if machine.is_gpu else Device.cpu]
    if not machine.is_gpu and machine.dtype is Dtype.bf16 and usable_isa() is Isa.amx:
        return replace(found, attention=AMX_ATTENTION)
    return found


def best_of(plans: Sequence[Plan]) -> Plan:
    """The fastest that fits, the earlier where two are as fast; where none fits, the smallest."""
    fitting = [plan for plan in plans if plan.fits]
    if fitting:
        return min(fitting, key=lambda plan: plan.seconds)
    return min(plans, key=lambda plan: max(phase.bytes for phase in plan.phases))


def _candidates(config: RunConfig, machine: Machine) -> Iterator[RunConfig]:
    """The configuration under every ZeRO setting that zero.auto may take; else as it is."""
    if not config.zero.auto:
        yield config
        return
    for changes in _settings(config):
        candidate = replace(config, zero=replace(config.zero, auto=False, **changes))
        zero = candidate.zero
        if machine.dtype is Dtype.fp16 and 0 in (zero.stage, zero.critic_stage):
            continue
        try:
            check_zero(candidate)
            check_engine(candidate)
            check_rollout(candidate)
        except ConfigError:
            continue
        yield candidate


def _settings(config: RunConfig) -> Iterator[dict[str, Any]]:
    """Stages and offloading, what is simplest first."""
    has_ppo = Phase.ppo in config.phase.order
    has_ema = has_ppo and bool(config.ppo.ema_beta)
    no = (False,)
    # On a CPU the memory of the ranks is the host's: nothing to offload to.
    either = (False, True) if config.hardware.device is Device.cuda else no
    for stage, critic_stage in product((1, 2, 3, 0), (None, 1, 2, 3, 0) if has_ppo else (None,)):
        if stage == critic_stage:
            continue
        own = stage if critic_stage is None else critic_stage
        shards = stage == SHARDED_WEIGHTS
        yield from (
            {
                "stage": stage,
                "critic_stage": critic_stage,
                "offload_optimizer": optimizer,
                "offload_parameters": parameters,
                "offload_reference": reference,
                "offload_reward": reward,
                "offload_ema": ema,
            }
            for optimizer, parameters, reference, reward, ema in product(
                either if stage else no,
                either if shards else no,
                either if shards else no,
                either if has_ppo and own == SHARDED_WEIGHTS else no,
                either if has_ema else no,
            )
        )
