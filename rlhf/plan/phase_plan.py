"""The plan of one phase, and the choice among several."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from rlhf.config.choices import Phase
from rlhf.config.machine_rates import Machine
from rlhf.plan.memory_model import Parts
from rlhf.plan.phase_memory import PhaseMemory

FILLED = 0.93  # share of a GPU that plans should fill at most, as their memory may be 6 % off
ROOM = 0.25  # relative difference of seconds that a plan of at most that share may cost
SLACK = 0.05  # relative difference of estimated seconds on a GPU that counts as equal


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
    """Seconds per step by activity: generate, score, branch, train."""
    steps: int | None
    """Steps of the phase; None if the examples cannot be counted."""
    other_seconds: dict[str, float] = field(default_factory=dict)
    """Seconds of the whole phase outside its steps, by purpose."""
    overlaps: bool = False
    """True if sampling takes place while the ranks score and train."""

    @property
    def peak_moment(self) -> str:
        """Return the name of the moment of peak memory."""
        return max(self.moments, key=lambda name: self.moments[name].total())

    @property
    def parts(self) -> Parts:
        """Return the bytes by purpose at the moment of peak memory."""
        return self.moments[self.peak_moment]

    @property
    def bytes(self) -> int:
        """Return the bytes of one rank at the moment of peak memory."""
        return self.parts.total()

    @property
    def seconds(self) -> float:
        """Return the seconds of the phase, or of one step if the number of steps is unknown.

        If sampling overlaps with training, a step takes as long as the slower of them, and training
        waits for the first responses.
        """
        sampling = self.step_seconds.get("generate", 0.0)
        training = sum(self.step_seconds.values()) - sampling
        step = max(sampling, training) if self.overlaps else sampling + training
        if self.steps is None:
            return step
        waiting = sampling + training - step if self.overlaps else 0.0
        return step * self.steps + waiting + sum(self.other_seconds.values())


def best_plan(options: Sequence[PhasePlan], scene: PhaseMemory) -> PhasePlan:
    """Return the largest of the fastest micro-batches that fit, else the plan of least memory."""
    fitting = [option for option in options if option.bytes <= scene.limit]
    if not fitting:
        return min(options, key=lambda option: option.bytes)
    fast = select_fastest(fitting, scene.at.machine)
    return max(fast, key=lambda option: option.micro_batch)


class Estimated(Protocol):
    """A plan with estimated time and memory."""

    @property
    def bytes(self) -> int:
        """Return the bytes of one rank at the moment of peak memory."""

    @property
    def seconds(self) -> float:
        """Return the estimated seconds."""


T = TypeVar("T", bound=Estimated)


def select_fastest(options: Sequence[T], machine: Machine) -> list[T]:
    """Return the options that are as fast as the fastest option, in their order.

    On a GPU, options that are up to 5 % slower count as equally fast, because times are estimates.
    Options that fill more than 93 % of the GPU are skipped, unless all others are 25 % slower.
    """
    fastest = min(option.seconds for option in options)
    if not machine.is_gpu:
        return [option for option in options if option.seconds == fastest]
    worth = fastest * (1 + ROOM)
    roomy = [each for each in options if each.bytes <= machine.memory * FILLED]
    options = [each for each in roomy if each.seconds <= worth] or options
    most = min(option.seconds for option in options) * (1 + SLACK)
    return [option for option in options if option.seconds <= most]
