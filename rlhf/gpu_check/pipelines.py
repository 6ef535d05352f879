"""Compare GPU runs of every engine, precision and number of ranks with runs on the CPU.

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
from rlhf.gpu_check.rows import CheckRow, Size, Task, checked_row, measured_row, skipped_row
from rlhf.gpu_check.runs import RUNS, SIDE_BY_SIDE, EndedRun, limit_of_run, run_to_end
from rlhf.options.replay.weight_digests import digest_of_slice
from rlhf.run.phase_state import checkpoint_folder, load_checkpoint

# Largest relative differences from the CPU's last losses of SFT and of the reward model; for bf16,
# twice its unit roundoff.
LOSS_TOLERANCES = {Dtype.fp32: 1e-3, Dtype.bf16: 8e-3, Dtype.fp16: 8e-3}
MOST_STANDARD_ERRORS = 4  # between mean scores, since rounding changes some tokens
RESPONSES = 16  # ppo.rollout_batch_size of experiment=smoke
LOSSES = {"sft/loss": "SFT", "reward/loss": "reward model", "ppo/score_mean": "score"}
SCORE_STD = "ppo/score_std"
MOST_RANKS = 8  # experiment=smoke has batches of 8 or a multiple

Losses = Mapping[str, float]  # the last values of LOSSES and SCORE_STD that a run has logged


def check_pipelines(folder: Path, _: Size) -> Iterator[Task]:
    """Yield a task for each run of the part ``pipelines``, on one GPU."""
    yield from _compare_with_cpu(folder, "pipelines", "TINY", SIDE_BY_SIDE)


def check_ranks(folder: Path, _: Size) -> Iterator[Task]:
    """Yield a task for the collectives of all GPUs, and one for each run of the part ``ranks``."""
    count = min(torch.cuda.device_count(), MOST_RANKS)
    if count == 1:
        yield "two GPUs", partial(skipped_row, "this machine has one GPU")
        return
    ranks = 1 << (count.bit_length() - 1)  # a power of two, which divides the batches
    yield f"collectives of {ranks} ranks", partial(_check_collectives, ranks)
    # Two at a time, since each of these runs uses all GPUs.
    shared = f"TINY STORED hardware.ranks_per_node={ranks}"
    yield from _compare_with_cpu(folder, "ranks", shared, ThreadPoolExecutor(2))


def _compare_with_cpu(
    folder: Path, part: str, shared: str, pool: ThreadPoolExecutor
) -> Iterator[Task]:
    """Start the runs of ``part``; a run on the CPU precedes the runs that are compared with it."""
    started = {}
    for name, words in words_by_run(part).items():
        run_dir = folder / name.replace(",", "").replace(" ", "_")
        started[name] = pool.submit(run_to_end, run_dir, f"{shared} {words}")
    reference = next(iter(started.values()))
    for name, run in started.items():
        if name.startswith("CPU"):
            reference = run
            yield name, partial(_report_reference_losses, run)
        else:
            yield name, partial(_compare_losses, run, reference, _precision(name))


def words_by_run(part: str) -> dict[str, str]:
    """Return the launch words of each run by its name, which ends with a precision of the card."""
    half = resolve_dtype(Dtype.auto, Device.cuda)
    by_name = {name.replace("HALF", half): words for name, words in RUNS[part].items()}
    return {
        name: f"{words} hardware.dtype={_precision(name)}"
        for name, words in by_name.items()
        if half is Dtype.bf16 or _precision(name) is not Dtype.bf16
    }


def _precision(name: str) -> Dtype:
    return Dtype(name.rpartition(" ")[2])


def last_losses(ended: EndedRun) -> Losses:
    """Return the last losses and the last score of the phases that a run has trained."""
    last: dict[str, float] = {}
    for line in ended.metrics:
        last |= line
    return {name: last[name] for name in (*LOSSES, SCORE_STD) if name in last}


def _report_reference_losses(ended: Future[EndedRun]) -> CheckRow:
    losses = last_losses(ended.result())
    return measured_row(_describe_losses(losses), **losses)


def _compare_losses(ended: Future[EndedRun], reference: Future[EndedRun], dtype: Dtype) -> CheckRow:
    run, share = ended.result(), LOSS_TOLERANCES[dtype]
    losses, expected = last_losses(run), last_losses(reference.result())
    wrong = "".join(f"; wrong digest: {name}" for name in differing_digests(run.run_dir))
    return checked_row(
        losses_agree(losses, expected, share) and not wrong,
        _describe_losses(losses) + wrong,
        f"losses ± {share:.1%}, score ± {score_tolerance(losses, expected):.2f}",
        **losses,
        run_seconds=run.seconds,
    )


def score_tolerance(ours: Losses, theirs: Losses) -> float:
    """Return the largest difference of two mean scores that sampling noise explains."""
    variances = [losses.get(SCORE_STD, 0.0) ** 2 / RESPONSES for losses in (ours, theirs)]
    return MOST_STANDARD_ERRORS * math.sqrt(sum(variances))


def losses_agree(losses: Losses, expected: Losses, share: float) -> bool:
    """Return True if rounding and sampling noise explain all differences; False for NaN."""
    allowed = {name: share * value for name, value in expected.items()}
    allowed["ppo/score_mean"] = score_tolerance(losses, expected)
    names = [name for name in LOSSES if name in expected]
    return all(abs(losses.get(n, math.nan) - expected[n]) <= allowed[n] for n in names)


def _describe_losses(losses: Losses) -> str:
    return ", ".join(f"{LOSSES[name]} {losses[name]:.4f}" for name in LOSSES if name in losses)


def differing_digests(run_dir: Path) -> list[str]:
    """Return the parameters whose logged digest is not the digest of the stored weights.

    Only steps whose checkpoints still exist are compared.
    """
    differing = []
    for line in DIGESTS.read_lines(run_dir):
        folder = checkpoint_folder(run_dir / line["phase"], line["step"])
        for name, digest in line["weights"].items() if folder.is_dir() else ():
            engine, _, parameter = name.partition("/")
            read = load_checkpoint(folder).build_tensor_reader(engine)
            stored = int(digest_of_slice(read(f"weights/{parameter}", slice(None)), 0))
            if digest != f"{stored % 2**64:016x}":
                differing.append(f"{line['phase']}/{name}")
    return differing


def _check_collectives(ranks: int) -> CheckRow:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={ranks}", "-m", "rlhf.gpu_check.collectives"]
    process = subprocess.run(
        command, stdout=subprocess.PIPE, text=True, timeout=limit_of_run(), check=False
    )
    printed = " ".join(process.stdout.split()) or "nothing was printed: see log.txt"
    return checked_row(not process.returncode, printed, "exact sums, maxima and order of ranks")
