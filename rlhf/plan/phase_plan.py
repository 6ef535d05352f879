"""The plan of one phase, and the choice among several plans."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import TYPE_CHECKING, TypeVar

from rlhf.config.choices import Phase
from rlhf.config.machine_rates import Machine
from rlhf.plan.memory_model import Parts
from rlhf.plan.phase_memory import PhaseMemory

if TYPE_CHECKING:
    from rlhf.plan.plan import Plan

BUILDING = "building"  # name of the moment in which models are built, before the first step
FILLED = 0.93  # share of a GPU above which a plan is avoided or gets a warning; see MOST_FILLED
SLOWER_FOR_ROOM = 0.25  # a plan within FILLED is preferred even if it is 25 % slower
SLACK = 0.05  # on a GPU, a plan that is up to 5 % slower counts as equally fast


@dataclass(frozen=True, kw_only=True)
class PhasePlan:
    """The memory and time that one phase takes on every rank."""

    phase: Phase
    micro_batch: int
    """Sequences per micro-batch; pairs in the reward and dpo phases."""
    rows: int | None = None
    """Responses decoded at once in PPO; None in the other phases."""
    gathers: bool = False
    """True if sharded weights are gathered once per rollout."""
    keeps_graphs: bool = False
    """True if CUDA graphs and KV cache stay allocated between rollouts."""
    moments: dict[str, Parts]
    """Bytes by purpose at each moment, such as generation."""
    host: int
    """Bytes that one rank keeps in the host's memory or on NVMe."""
    step_seconds: dict[str, float]
    """Seconds per step by activity, such as generate, score and train."""
    steps: int | None
    """Steps of the phase; None if the examples cannot be counted."""
    other_seconds: dict[str, float] = field(default_factory=dict)
    """Seconds of the whole phase outside its steps, by purpose."""
    beside: str | None = None
    """The activity of a step that processes other than the ranks do at the same time; or None."""

    @property
    def peak_moment(self) -> str:
        """Return the name of the moment of peak memory."""
        return max(self.moments, key=lambda name: self.moments[name].total())

    @property
    def peak_parts(self) -> Parts:
        """Return the bytes by purpose at the moment of peak memory."""
        return self.moments[self.peak_moment]

    @property
    def peak_bytes(self) -> int:
        """Return the bytes of one rank at the moment of peak memory."""
        return self.peak_parts.total()

    @property
    def seconds(self) -> float:
        """Return the seconds of the phase, or of one step if the number of steps is unknown.

        If other processes do the activity ``beside``, a step takes as long as the slower side, the
        processes or the ranks. The time of the faster side is added once, for the first step.
        """
        beside_s = self.step_seconds.get(self.beside or "generate", 0.0)
        ranks_s = sum(self.step_seconds.values()) - beside_s
        step = beside_s + ranks_s if self.beside is None else max(beside_s, ranks_s)
        if self.steps is None:
            return step
        waiting = beside_s + ranks_s - step
        return step * self.steps + waiting + sum(self.other_seconds.values())

    def moments_with(self, parts: Parts) -> dict[str, Parts]:
        """Return the bytes at each moment, with ``parts`` added except while models are built."""
        return {
            name: each if name == BUILDING else each + parts for name, each in self.moments.items()
        }


def choose_phase_plan(plans: Sequence[PhasePlan], scene: PhaseMemory) -> PhasePlan:
    """Return the fastest plan that fits, or of equally fast plans the one with the least memory.

    If no plan fits, return the plan with the least memory. On a GPU only steps are compared,
    because the rest of a short phase would hide them.
    """
    machine = scene.at.machine
    fitting = [plan for plan in plans if plan.peak_bytes <= scene.memory_limit]
    seconds = (lambda plan: sum(plan.step_seconds.values())) if machine.is_gpu else SECONDS
    fast = select_fastest(fitting, machine, seconds) if fitting else plans
    return min(fast, key=lambda plan: plan.peak_bytes)


def leaves_room(plan: PhasePlan | Plan, machine: Machine) -> bool:
    """Return True on a CPU, or if the plan fills at most 93 % of the GPU."""
    return not machine.is_gpu or plan.peak_bytes <= machine.memory * FILLED


T = TypeVar("T", "PhasePlan", "Plan")
SECONDS: Callable[[PhasePlan | Plan], float] = attrgetter("seconds")


def select_fastest(
    plans: Sequence[T], machine: Machine, seconds: Callable[[T], float] = SECONDS
) -> list[T]:
    """Return the plans that are as fast as the fastest plan, in their order.

    On a GPU, plans that are up to 5 % slower count as equally fast, because times are estimates.
    Plans that fill more than 93 % of the GPU are skipped, unless all others are over 25 % slower.
    """
    fastest = min(map(seconds, plans))
    if not machine.is_gpu:
        return [plan for plan in plans if seconds(plan) == fastest]
    slowest = fastest * (1 + SLOWER_FOR_ROOM)
    roomy = [each for each in plans if leaves_room(each, machine)]
    plans = [each for each in roomy if seconds(each) <= slowest] or plans
    most = min(map(seconds, plans)) * (1 + SLACK)
    return [plan for plan in plans if seconds(plan) <= most]
