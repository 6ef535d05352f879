"""Costs of sampling processes beside the ranks (rollout.overlap): memory and time of a step.

A step takes as long as the slower of sampling and training. Sampling processes do not change the
chosen micro-batch, since a run should compute the same with and without them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from rlhf.base.cpu import num_usable_cores
from rlhf.config.batches import divide_cores, num_ranks, rollout_plan
from rlhf.config.choices import Device
from rlhf.config.schema.keys import format_value
from rlhf.config.schema.run import RunConfig
from rlhf.plan.savings import Saving

if TYPE_CHECKING:
    from rlhf.plan.phase_memory import PhaseMemory
    from rlhf.plan.phase_plan import PhasePlan

SAMPLING = "generation beside training"  # name, in a plan, of the memory of a sampling GPU


def plan_overlap(
    scene: PhaseMemory,
    plan_ppo: Callable[[PhaseMemory], PhasePlan],
    plan_rollout: Callable[[PhaseMemory, int, int], PhasePlan],
) -> PhasePlan:
    """Return the plan of ranks that train while processes sample."""
    rank_cores, sampler_cores = divide_cores(scene.config, num_usable_cores())
    ranks = plan_ppo(_restrict_to_cores(scene, rank_cores))
    process = _plan_process(_restrict_to_cores(scene, sampler_cores), ranks.rows or 0, plan_rollout)
    if scene.at.machine.is_gpu:  # each process has its own GPU
        moments = ranks.moments | {SAMPLING: process.peak_parts}
    else:
        count = scene.config.rollout.samplers
        samplers = process.peak_bytes * count // scene.at.machine.ranks_per_node
        moments = ranks.moments_with(Counter(samplers=samplers))
    seconds = ranks.step_seconds | process.step_seconds
    return replace(ranks, moments=moments, step_seconds=seconds, beside="generate")


def propose_smaller_sampling(config: RunConfig) -> Iterator[Saving]:
    """Yield savings: more sampling processes, fewer rows in each, and no overlap."""
    if not config.rollout.overlap:
        return
    rollout, batch = config.rollout, config.ppo.rollout_batch_size
    share, ranks = batch // rollout.samplers, num_ranks(config)
    is_gpu = config.hardware.device is Device.cuda
    counts = (n for n in range(2 * rollout.samplers, ranks + 1) if batch % n == 0 and is_gpu)
    changes: list[dict[str, Any]] = [{"samplers": n} for n in counts]
    changes += [{"max_rows": share // parts} for parts in (2, 4, 8) if share >= parts]
    for change in [*changes, {"overlap": False}]:
        ((name, value),) = change.items()
        words = f"rollout.{name}={format_value(value)}"
        yield Saving(words, replace(config, rollout=replace(rollout, **change)), is_exact=True)


def _restrict_to_cores(scene: PhaseMemory, cores: int) -> PhaseMemory:
    """Return ``scene`` with the speed of a process that has ``cores`` cores of a node's CPU."""
    machine = scene.at.machine
    if machine.is_gpu:
        return scene
    share = cores * machine.ranks_per_node / num_usable_cores()  # a machine's rates are per rank
    slower = replace(
        machine, operations=machine.operations * share, bandwidth=machine.bandwidth * share
    )
    return replace(scene, at=replace(scene.at, machine=slower))


def _plan_process(
    scene: PhaseMemory, rows: int, plan_rollout: Callable[[PhaseMemory, int, int], PhasePlan]
) -> PhasePlan:
    """Plan a process that has the policy's whole weights and samples its share of a step.

    It decodes up to ``rows`` responses at once, like a rank. If a rank decodes all its responses at
    once, the process decodes its whole share, or rollout.max_rows, at once.
    """
    share = scene.config.ppo.rollout_batch_size // scene.config.rollout.samplers
    policy = replace(scene.models[0], trained=0, fp32_copies=())
    process = replace(scene, at=scene.at.with_whole_weights(), models=(policy,))
    most = scene.config.rollout.max_rows or share
    rows = most if rows == rollout_plan(scene.config).per_rank else min(rows, most)
    return plan_rollout(process, share, min(rows, share))
