"""Compare runs on the GPU, with every engine, precision and number of ranks, with runs on the CPU.

The parts ``pipelines`` (one GPU) and ``ranks`` (several) have their runs in runs.yaml.
"""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path

import torch

from rlhf.base.stored_files import DIGESTS
from rlhf.config.choices import Device, Dtype
from rlhf.engine.devices import resolve_dtype
from rlhf.gpu_check.rows import (
    CheckSetting,
    Finding,
    Task,
    checked_finding,
    measured_finding,
    skipped_finding,
)
from rlhf.gpu_check.runs import RUNS, SIDE_BY_SIDE, EndedRun, limit_of_run, run_to_end
from rlhf.options.replay.weight_digests import digest_of_slice
from rlhf.run.phase_state import checkpoint_folder, load_checkpoint

# Largest relative difference from the CPU's last losses of SFT and of the reward model.
# The difference for bf16 is twice the unit roundoff of bf16.
SHARES = {Dtype.fp32: 1e-3, Dtype.bf16: 8e-3, Dtype.fp16: 8e-3}
ERRORS = 4  # standard errors by which mean scores may differ: rounding changes some tokens
RESPONSES = 16  # ppo.rollout_batch_size of experiment=smoke
LOSSES = {"sft/loss": "SFT", "reward/loss": "reward model", "ppo/score_mean": "score"}
SCORE_STD = "ppo/score_std"
MOST_RANKS = 8  # experiment=smoke has batches of 8 and of multiples of 8

Losses = Mapping[str, float]  # the last values of LOSSES and SCORE_STD that a run has logged


def tasks(setting: CheckSetting) -> Iterator[Task]:
    """Yield a task for each run of the part; a run on the CPU precedes those compared with it."""
    shared, pool = "TINY", SIDE_BY_SIDE
    if setting.part == "ranks":
        count = min(torch.cuda.device_count(), MOST_RANKS)
        if count == 1:
            yield Task("two GPUs", partial(skipped_finding, "this machine has one GPU"))
            return
        ranks = 1 << (count.bit_length() - 1)  # a power of two, as batches are
        yield Task(f"collectives of {ranks} ranks", partial(_check_collectives, ranks))
        # Two at a time, since each of these runs uses all GPUs.
        shared, pool = f"TINY STORED hardware.ranks_per_node={ranks}", ThreadPoolExecutor(2)
    started = {
        name: pool.submit(
            run_to_end,
            setting.folder / name.replace(",", "").replace(" ", "_"),
            f"{shared} {words}",
        )
        for name, words in words_by_run(setting.part).items()
    }
    reference = next(iter(started.values()))
    for name, ended in started.items():
        if name.startswith("CPU"):
            reference = ended
            yield Task(name, partial(_report_reference_losses, ended))
        else:
            yield Task(name, partial(_compare_losses, ended, reference, _precision(name)))


def words_by_run(part: str) -> dict[str, str]:
    """Return the words of each run by its name, which ends with a precision of the card."""
    half = resolve_dtype(Dtype.auto, Device.cuda)
    named = {name.replace("HALF", half): words for name, words in RUNS[part].items()}
    return {
        name: f"{words} hardware.dtype={_precision(name)}"
        for name, words in named.items()
        if half is Dtype.bf16 or _precision(name) is not Dtype.bf16
    }


def _precision(name: str) -> Dtype:
    return Dtype(name.rpartition(" ")[2])


def last_losses(ended: EndedRun) -> Losses:
    """Return the last losses and the last score of the phases that a run has trained."""
    _ = ended.result  # a run that failed raises here
    last: dict[str, float] = {}
    for line in ended.metrics:
        last |= line
    return {name: last[name] for name in (*LOSSES, SCORE_STD) if name in last}


def _report_reference_losses(ended: Future[EndedRun]) -> Finding:
    losses = last_losses(ended.result())
    return measured_finding(_describe_losses(losses), **losses)


def _compare_losses(ended: Future[EndedRun], reference: Future[EndedRun], dtype: Dtype) -> Finding:
    run, share = ended.result(), SHARES[dtype]
    there, here = last_losses(run), last_losses(reference.result())
    wrong = "".join(f"; wrong digest: {each}" for each in differing_digests(run.run_dir))
    return checked_finding(
        losses_agree(there, here, share) and not wrong,
        _describe_losses(there) + wrong,
        f"losses ± {share:.1%}, score ± {score_tolerance(there, here):.2f}",
        **there,
        run_seconds=run.seconds,
    )


def score_tolerance(there: Losses, here: Losses) -> float:
    """Return the largest difference of two mean scores that sampling noise explains."""
    variances = [each.get(SCORE_STD, 0.0) ** 2 / RESPONSES for each in (there, here)]
    return ERRORS * math.sqrt(sum(variances))


def losses_agree(there: Losses, here: Losses, share: float) -> bool:
    """Return True if rounding and sampling noise explain how two runs differ; False for NaN."""
    allowed = {name: share * value for name, value in here.items()}
    allowed["ppo/score_mean"] = score_tolerance(there, here)
    found = [name for name in LOSSES if name in here]
    return all(abs(there.get(each, math.nan) - here[each]) <= allowed[each] for each in found)


def _describe_losses(losses: Losses) -> str:
    return ", ".join(f"{LOSSES[name]} {losses[name]:.4f}" for name in LOSSES if name in losses)


def differing_digests(run_dir: Path) -> list[str]:
    """Return the parameters whose digest over ranks is not that of their stored weights.

    Compared are the digests of the steps whose checkpoints are still there.
    """
    found = []
    for line in DIGESTS.read_lines(run_dir):
        folder = checkpoint_folder(run_dir / line["phase"], line["step"])
        for name, digest in line["weights"].items() if folder.is_dir() else ():
            engine, _, parameter = name.partition("/")
            read = load_checkpoint(folder).build_tensor_reader(engine)
            stored = int(digest_of_slice(read(f"weights/{parameter}", slice(None)), 0))
            if digest != f"{stored % 2**64:016x}":
                found.append(f"{line['phase']}/{name}")
    return found


def _check_collectives(ranks: int) -> Finding:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={ranks}", "-m", "rlhf.gpu_check.collectives"]
    ended = subprocess.run(
        command, stdout=subprocess.PIPE, text=True, timeout=limit_of_run(), check=False
    )
    found = " ".join(ended.stdout.split()) or "nothing was printed: see log.txt"
    return checked_finding(not ended.returncode, found, "exact sums, maxima and order of ranks")
