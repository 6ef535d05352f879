"""Costs of sampling in processes of their own while the ranks train (rollout.overlap)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from rlhf.base.cpu import num_usable_cores
from rlhf.base.seams import Costs, Saving
from rlhf.config.batches import divide_cores, rollout_plan
from rlhf.config.roles import SHARDED_WEIGHTS
from rlhf.config.schema.run import RunConfig

if TYPE_CHECKING:
    from rlhf.plan.phase_memory import PhaseMemory
    from rlhf.plan.phase_plan import PhasePlan

SAMPLING = "generation beside training"  # the moment in which a GPU of its own samples


class SamplingProcessCosts(Costs):
    """The memory of sampling processes, and a step that takes as long as its slower part.

    They do not change which micro-batch is chosen, since sampling in turn and beside training are
    the same run.
    """

    def rearrange_ppo(
        self,
        scene: PhaseMemory,
        plan: PhasePlan,
        plan_ppo: Callable[[PhaseMemory], PhasePlan],
        plan_rollout: Callable[[PhaseMemory, int, int], PhasePlan],
    ) -> PhasePlan:
        """Return the plan of ranks that train while processes sample."""
        if not scene.config.rollout.overlap:
            return plan
        own, theirs = divide_cores(scene.config, num_usable_cores())
        ranks = plan_ppo(_with_cores(scene, own))
        process = _plan_process(_with_cores(scene, theirs), ranks.rows or 0, plan_rollout)
        if scene.at.machine.is_gpu:  # each process has a GPU of its own
            moments = ranks.moments | {SAMPLING: process.parts}
        else:
            count = scene.config.rollout.samplers
            samplers = process.bytes * count // scene.at.machine.ranks_per_node
            moments = ranks.add_to_moments(Counter(samplers=samplers))
        seconds = ranks.step_seconds | process.step_seconds
        return replace(ranks, moments=moments, step_seconds=seconds, beside="generate")

    def savings(self, config: RunConfig) -> Iterator[Saving]:
        """Yield the change that samples in turn."""
        if config.rollout.overlap:
            in_turn = replace(config.rollout, overlap=False)
            yield Saving("rollout.overlap=false", replace(config, rollout=in_turn), is_exact=True)


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


def _plan_process(
    scene: PhaseMemory, rows: int, plan_rollout: Callable[[PhaseMemory, int, int], PhasePlan]
) -> PhasePlan:
    """Plan a process that holds the policy's weights, whole, and samples its share of a step.

    It decodes ``rows`` responses at once, or all of its share if these are all of a rank's.
    """
    at = scene.at
    share = scene.config.ppo.rollout_batch_size // scene.config.rollout.samplers
    # The highest stage whose weights are whole: the precision of weights depends on the stage.
    stage = min(at.zero.stage, SHARDED_WEIGHTS - 1)
    zero = replace(at.zero, stage=stage, offload_parameters=False)
    process = replace(
        scene,
        at=replace(at, machine=replace(at.machine, ranks=1, nodes=1), zero=zero),
        models=(replace(scene.models[0], trained=0, fp32_copies=()),),
    )
    rows = share if rows == rollout_plan(scene.config).per_rank else min(rows, share)
    return plan_rollout(process, share, rows)


COSTS = SamplingProcessCosts()
