"""Compare SFT, reward model and PPO on every engine and precision with the same run on the CPU."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import NamedTuple

from rlhf.config.choices import Device, Dtype
from rlhf.engine.devices import resolve_dtype
from rlhf.gpu_check.rows import CheckSetting, Finding, Task, checked_finding, measured_finding
from rlhf.gpu_check.runs import TINY_RUN, EndedRun, run_to_end

REFERENCE = "CPU, fp32"
# Largest relative difference from the CPU's last losses of SFT and of the reward model.
# The difference for bf16 is twice the unit roundoff of bf16.
SHARES = {Dtype.fp32: 1e-3, Dtype.bf16: 8e-3, Dtype.fp16: 8e-3}
ERRORS = 4  # standard errors by which mean scores may differ: rounding changes some tokens


class Losses(NamedTuple):
    """The last losses and the last score of a run; the score is a mean over ``responses``."""

    sft: float
    reward: float
    score: float
    score_std: float
    responses: int


def tasks(setting: CheckSetting) -> Iterator[Task]:
    """Yield a task for the run on the CPU, then one for each engine, stage and precision."""
    # Run one pipeline per four cores at a time, as a pipeline often uses one core only.
    with ThreadPoolExecutor(max(1, len(os.sched_getaffinity(0)) // 4)) as runs:
        words = {REFERENCE: ["hardware=cpu", "hardware.dtype=fp32"], **overrides_by_run()}
        ended = {
            name: runs.submit(run_to_end, setting.folder / _folder_name(name), *TINY_RUN, *each)
            for name, each in words.items()
        }
        yield Task(REFERENCE, partial(_report_reference_losses, ended[REFERENCE]))
        for name in list(words)[1:]:
            dtype = Dtype(name.rpartition(" ")[2])
            yield Task(name, partial(_compare_losses, ended[name], ended[REFERENCE], dtype))


def overrides_by_run() -> dict[str, list[str]]:
    """Return the overrides of each GPU run, by the run's name, which ends with the precision."""
    half = resolve_dtype(Dtype.auto, Device.cuda)
    torch_engine, deepspeed = "zero.engine=torch", "zero.engine=deepspeed"
    found = [("torch, stage 1", Dtype.fp32, "zero=stage1", torch_engine)]
    if half is Dtype.bf16:
        found += [(f"torch, stage {n}", half, f"zero=stage{n}", torch_engine) for n in (0, 1)]
        found += [("DeepSpeed, stage 0", half, "zero=stage0", deepspeed)]
    found += [(f"DeepSpeed, stage {n}", half, f"zero=stage{n}", deepspeed) for n in (1, 2, 3)]
    found += [(f"offload, stage {n}", half, f"zero=stage{n}_offload", deepspeed) for n in (2, 3)]
    if half is Dtype.bf16:  # stage 0 refuses fp16, because it has no fp32 master weights
        found += [
            (f"DeepSpeed, stage {n}", Dtype.fp16, f"zero=stage{n}", deepspeed) for n in (1, 2, 3)
        ]
    return {
        f"{name}, {dtype}": ["hardware=auto", f"hardware.dtype={dtype}", *words]
        for name, dtype, *words in found
    }


def _folder_name(name: str) -> str:
    return name.lower().replace(",", "").replace(" ", "_")


def last_losses(ended: EndedRun) -> Losses:
    """Return the last losses and the last score of a run."""
    _ = ended.result  # a run that failed raises here
    last: dict[str, float] = {}
    for line in ended.metrics:
        last |= line
    return Losses(
        last["sft/loss"],
        last["reward/loss"],
        last["ppo/score_mean"],
        last["ppo/score_std"],
        responses=16,  # ppo.rollout_batch_size of experiment=smoke
    )


def _report_reference_losses(ended: Future[EndedRun]) -> Finding:
    losses = last_losses(ended.result())
    return measured_finding(_describe_losses(losses), **losses._asdict())


def _compare_losses(ended: Future[EndedRun], reference: Future[EndedRun], dtype: Dtype) -> Finding:
    there, here = last_losses(ended.result()), last_losses(reference.result())
    share, apart = SHARES[dtype], score_tolerance(there, here)
    return checked_finding(
        losses_agree(there, here, share),
        _describe_losses(there),
        f"losses ± {share:.1%}, score ± {apart:.2f}",
        **there._asdict(),
        run_seconds=ended.result().seconds,
    )


def score_tolerance(there: Losses, here: Losses) -> float:
    """Return the largest difference of two mean scores that sampling noise explains."""
    variances = there.score_std**2 / there.responses + here.score_std**2 / here.responses
    return ERRORS * math.sqrt(variances)


def losses_agree(there: Losses, here: Losses, share: float) -> bool:
    """Return True if rounding and sampling noise explain how two runs differ; False for NaN."""
    return (
        abs(there.sft - here.sft) <= share * here.sft
        and abs(there.reward - here.reward) <= share * here.reward
        and abs(there.score - here.score) <= score_tolerance(there, here)
    )


def _describe_losses(losses: Losses) -> str:
    sft, reward, score = losses.sft, losses.reward, losses.score
    return f"SFT {sft:.4f}, reward model {reward:.4f}, score {score:.3f}"
