"""Explain out-of-memory errors by plan and keys that help, or use smaller micro-batches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from rlhf.base.errors import RlhfError
from rlhf.base.packaged_yaml import read_yaml_beside
from rlhf.config.batches import batch_plans, num_ranks, rollout_plan
from rlhf.config.choices import Device, OnOom, Phase, When
from rlhf.config.roles import SHARDED_WEIGHTS
from rlhf.config.schema.run import RunConfig
from rlhf.run.results import read_plan

ALLOCATION_ERRORS: Sequence[str] = read_yaml_beside(__file__, "allocation_errors.yaml")


class OutOfMemoryError(RlhfError):
    """The error of a phase that needs more memory; the message names keys that help."""


@contextmanager
def explain_out_of_memory(config: RunConfig, phase: Phase, run_dir: Path) -> Iterator[None]:
    """Replace an out-of-memory error in the context by an OutOfMemoryError with advice."""
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        micro = batch_plans(config)[phase].micro
        overrides = _memory_saving_overrides(config, phase)
        if micro > 1:
            overrides.insert(0, f"{phase}.micro_batch_size={smaller_micro_batch(config, phase)}")
        first_line = str(error).strip().partition("\n")[0].rstrip(".")
        failed = (
            f"{phase}: out of memory with {phase}.micro_batch_size={micro}"
            f"{_describe_planned_memory(run_dir, phase)}: {first_line or type(error).__name__}. "
        )
        raise OutOfMemoryError(
            f"{failed}python launch.py resume={run_dir} {' '.join(overrides)} continues with less "
            f"memory{'; hardware.on_oom=reduce_micro_batch does so by itself' if micro > 1 else ''}"
            if overrides
            else f"{failed}No key that resume may change needs less memory here: start a run with "
            "model.gradient_checkpointing=true, for the reward model and critic "
            "reward_model.gradient_checkpointing=true, lora=all, a smaller model or shorter texts"
        ) from error


def is_out_of_memory(error: BaseException) -> bool:
    """Return True if ``error``, or an earlier error that led to it, is a failed allocation.

    If an allocation fails while a CUDA graph is captured, torch raises an error about the capture,
    whose ``__context__`` is the error of the failed allocation.
    """
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    if isinstance(error, RuntimeError) and any(text in str(error) for text in ALLOCATION_ERRORS):
        return True
    earlier = error.__cause__ or error.__context__
    return earlier is not None and is_out_of_memory(earlier)


def _memory_saving_overrides(config: RunConfig, phase: Phase) -> list[str]:
    """Return overrides, other than smaller micro-batches, that reduce the memory of a rank."""
    keys = []
    if phase is Phase.ppo and config.rollout.keep_graphs is When.always:
        keys.append("rollout.keep_graphs=never")
    if num_ranks(config) > 1 and config.zero.stage != SHARDED_WEIGHTS:
        keys.append("zero=stage3")
    elif config.hardware.device is Device.cuda and not config.zero.offload_optimizer:
        keys.append(f"zero=stage{max(2, config.zero.stage)}_offload")
    return keys


def smaller_micro_batch(config: RunConfig, phase: Phase) -> int:
    """Return the next smaller micro-batch size of ``phase`` that divides a rank's batch."""
    plan = batch_plans(config)[phase]
    return next(size for size in range(plan.micro - 1, 0, -1) if not plan.per_rank % size)


def with_less_memory(config: RunConfig) -> RunConfig | None:
    """Return ``config`` with smaller micro-batches, and fewer rollout rows decoded at once.

    Steps are equal up to rounding. Returns None if hardware.on_oom=stop or these numbers are all 1.
    """
    if config.hardware.on_oom is not OnOom.reduce_micro_batch:
        return None
    plans = batch_plans(config)
    groups: dict[str, Any] = {
        phase.value: replace(
            getattr(config, phase.value), micro_batch_size=smaller_micro_batch(config, phase)
        )
        for phase in config.phase.order
        if plans[phase].micro > 1
    }
    rows = config.rollout.max_rows or rollout_plan(config).per_rank
    if Phase.ppo in config.phase.order and rows > 1:
        groups["rollout"] = replace(config.rollout, max_rows=rows // 2, keep_graphs=When.never)
    return replace(config, **groups) if groups else None


def _describe_planned_memory(run_dir: Path, phase: Phase) -> str:
    plan = read_plan(run_dir)
    if plan is None or phase not in plan["phases"]:
        return ""
    gib = plan["phases"][phase]["memory_gib_per_rank"]
    return f" (planned: {gib:.1f} of {plan['memory_gib_limit']:.1f} GiB per rank)"
