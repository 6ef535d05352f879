"""Arithmetic of batch sizes: division of steps and rollouts over ranks and micro-batches."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING

from rlhf.base.errors import ConfigError
from rlhf.config.choices import Phase
from rlhf.methods import methods_in_use

if TYPE_CHECKING:
    from rlhf.config.schema.run import RunConfig

RANKS_KEYS = "hardware.nodes*hardware.ranks_per_node"


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchPlan:
    """The division of one optimizer step over ranks and micro-batches.

    The items are sequences, or pairs in reward and dpo.
    """

    per_rank: int
    """Items that one rank contributes to a step."""
    micro: int
    """Items that one rank runs at once: the size of a micro-batch."""
    accumulation: int
    """Micro-batches of one rank per step (gradient accumulation)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutPlan:
    """The division of one rollout of PPO over ranks and optimizer steps."""

    per_rank: int
    """Responses that one rank samples."""
    prompts_per_rank: int
    """Prompts that one rank answers."""
    mini_batches: int
    """Optimizer steps in one pass over the rollout."""


def num_ranks(config: RunConfig) -> int:
    """Return the number of ranks (processes) of the whole run."""
    return config.hardware.nodes * config.hardware.ranks_per_node


def divide_exactly(total: int, part: int, *, total_key: str, part_key: str) -> int:
    """Return ``total / part``; if a remainder is left, raise ConfigError with values that work."""
    if total % part == 0:
        return total // part
    lower = total - total % part
    totals = [lower, lower + part] if lower else [part]
    all_parts = divisors(total)
    parts = [*[d for d in all_parts if d < part][-1:], *[d for d in all_parts if d > part][:1]]
    raise ConfigError(
        f"{total_key}={total}: must be a multiple of {part_key}={part}; "
        f"use {total_key}={' or '.join(map(str, totals))}, "
        f"or {part_key}={' or '.join(map(str, parts))}"
    )


def divisors(number: int) -> list[int]:
    """Return all divisors of ``number``, the smallest first."""
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})


def build_batch_plan(
    batch_size: int, *, key: str, ranks: int, micro_batch_size: int | None, cap: int
) -> BatchPlan:
    """Return the division of ``batch_size``, the value of ``key``, over ``ranks``.

    If ``micro_batch_size`` is None, a micro-batch has the largest size that divides a rank's items
    and is at most ``cap``.
    """
    per_rank = divide_exactly(batch_size, ranks, total_key=key, part_key=RANKS_KEYS)
    if micro_batch_size is None:
        micro = max(size for size in divisors(per_rank) if size <= cap)
        return BatchPlan(per_rank=per_rank, micro=micro, accumulation=per_rank // micro)
    accumulation = divide_exactly(
        per_rank,
        micro_batch_size,
        total_key=f"{key}/ranks",
        part_key=f"{key.partition('.')[0]}.micro_batch_size",
    )
    return BatchPlan(per_rank=per_rank, micro=micro_batch_size, accumulation=accumulation)


def sequences_per_example(config: RunConfig, phase: Phase) -> int:
    """Return 2 if an example of the phase is a pair of sequences, otherwise 1."""
    is_paired = phase is Phase.dpo or (phase is Phase.reward and config.reward.unpaired is None)
    return 2 if is_paired else 1


def batch_plans(config: RunConfig) -> dict[Phase, BatchPlan]:
    """Return the batch plan of every phase that runs."""
    cap = config.hardware.max_micro_batch_size
    plans = {}
    for phase in config.phase.order:
        name = "mini_batch_size" if phase is Phase.ppo else "batch_size"
        keys = getattr(config, phase.value)
        plans[phase] = build_batch_plan(
            getattr(keys, name),
            key=f"{phase}.{name}",
            ranks=num_ranks(config),
            micro_batch_size=keys.micro_batch_size,
            cap=max(1, cap // sequences_per_example(config, phase)),
        )
    return plans


def rollout_plan(config: RunConfig) -> RolloutPlan:
    """Return the division of each rollout of PPO over ranks and optimizer steps."""
    key, size = "ppo.rollout_batch_size", config.ppo.rollout_batch_size
    per_rank = divide_exactly(size, num_ranks(config), total_key=key, part_key=RANKS_KEYS)
    return RolloutPlan(
        per_rank=per_rank,
        prompts_per_rank=divide_exactly(
            per_rank,
            config.ppo.responses_per_prompt,
            total_key=f"{key}/ranks",
            part_key="ppo.responses_per_prompt",
        ),
        mini_batches=divide_exactly(
            size, config.ppo.mini_batch_size, total_key=key, part_key="ppo.mini_batch_size"
        ),
    )


def divide_cores(config: RunConfig, cores: int) -> tuple[int, int]:
    """Return two shares of a node's ``cores``: cores per rank, and cores per sampling process.

    Without hardware.cores_per_rank, the shares are equal; sampling processes get the remainder.
    """
    ranks, samplers = config.hardware.ranks_per_node, config.rollout.samplers
    per_rank = config.hardware.cores_per_rank or max(1, cores // (ranks + samplers))
    return per_rank, max(1, (cores - per_rank * ranks) // samplers)


def examples_per_step(config: RunConfig, phase: Phase) -> int:
    """Return the number of training examples per optimizer step (PPO: prompts per rollout)."""
    if phase is Phase.ppo:
        return config.ppo.rollout_batch_size // config.ppo.responses_per_prompt
    return int(getattr(config, phase.value).batch_size)


def batch_sizes_for_few(config: RunConfig, phase: Phase, *, examples: int) -> str | None:
    """Return key=value for batches that the few ``examples`` of ``phase`` fill; None: too few.

    Supervised phases get about 8 batches, and the epochs that end their warmup halfway. PPO gets
    one rollout of all prompts, with its number of mini-batches if possible.
    """
    ranks, ppo = num_ranks(config), config.ppo
    if phase is not Phase.ppo:
        size = max(examples // 8 // ranks, 1) * ranks
        group = getattr(config, phase.value)
        epochs = math.ceil(2 * group.warmup_steps * size / examples) if examples else 0
        more_epochs = f" {phase}.epochs={epochs}" if epochs > group.epochs else ""
        return f"{phase}.batch_size={size}{more_epochs}" if examples >= size else None
    responses = examples * ppo.responses_per_prompt
    most_mini_batches = min(ppo.rollout_batch_size // ppo.mini_batch_size, responses // ranks)
    for mini_batches in range(most_mini_batches, 0, -1):
        unit = ranks * math.lcm(ppo.responses_per_prompt, mini_batches)
        if size := responses - responses % unit:
            return f"ppo.rollout_batch_size={size} ppo.mini_batch_size={size // mini_batches}"
    return None


def num_phase_steps(config: RunConfig, phase: Phase, *, examples: int) -> int:
    """Return the number of optimizer steps (PPO: rollouts) for ``examples`` training examples."""
    ppo, per_step = config.ppo, examples_per_step(config, phase)
    if phase is Phase.ppo:
        rollouts = None
        if ppo.epochs is not None:
            rollouts = max(1, math.ceil(examples * Fraction(str(ppo.epochs)) / per_step))
        return min(limit for limit in (ppo.steps, rollouts) if limit is not None)
    epochs = Fraction(str(getattr(config, phase.value).epochs))
    steps = math.ceil(examples * epochs / per_step)
    for method in methods_in_use(config):
        steps += method.num_added_steps(config, phase, examples=examples)
    return steps


def num_added_micro_batches(config: RunConfig) -> int:
    """Return the micro-batches of pretraining text per optimizer step and rank of PPO's actor."""
    from rlhf.options.ptx.rules import ptx_batch_plan, uses_corpus

    return ptx_batch_plan(config).accumulation if uses_corpus(config) else 0
