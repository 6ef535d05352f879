"""A phase that needs too much memory: what the run says, and how it goes on by itself."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from rlhf.allocation_errors import is_out_of_memory
from tests.runs import ROOT, TINY_RUN, finished, metrics, python

pytestmark = pytest.mark.slow

# The SFT phase really fails to allocate, in its second step, unless micro-batches are small.
GREEDY = f"""
import runpy
import torch
from rlhf.phases import sft
take = sft.SftTrainer.train_step
def greedy(self, rows):
    self.taken = getattr(self, "taken", 0) + 1
    if self.taken == 2 and self.plan.micro > 4:
        torch.empty(1 << 48)
    return take(self, rows)
sft.SftTrainer.train_step = greedy
runpy.run_path("{ROOT}/launch.py", run_name="__main__")
"""
SFT = [*TINY_RUN, "phase=sft", "sft.epochs=0.5", "checkpoint.every_steps=1"]


# torch's own class aside, these are the forms of a failed allocation on a GPU.
TEXTS = [
    torch.AcceleratorError("CUDA error: out of memory"),
    RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported"),
    RuntimeError("CUDA driver error: out of memory"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
    torch.distributed.DistBackendError("NCCL error: unhandled cuda error 2 'out of memory'"),
]


@pytest.mark.parametrize("error", TEXTS, ids=lambda error: str(error)[:40])
def test_every_form_of_a_failed_allocation_is_known(error: Exception) -> None:
    assert is_out_of_memory(error)


def test_an_allocation_that_fails_in_a_capture_is_known() -> None:
    capture = RuntimeError("CUDA error: operation failed due to a previous error during capture")
    assert not is_out_of_memory(capture), "the previous error may have been any"
    capture.__context__ = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
    assert is_out_of_memory(capture)


@pytest.fixture
def greedy(tmp_path: Path) -> Path:
    path = tmp_path / "greedy.py"
    path.write_text(GREEDY)
    return path


def test_message_has_the_plan_and_the_keys(greedy: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    run = python(greedy, *SFT, f"run_dir={run_dir}", cwd=tmp_path, PYTHONPATH=ROOT)
    assert run.returncode == 2
    assert run.stderr.startswith("error: sft: out of memory with sft.micro_batch_size=16 (planned:")
    assert "GiB per rank): " in run.stderr
    assert "can't allocate memory: you tried to allocate" in run.stderr
    keys = "sft.micro_batch_size=8 zero=stage3"
    assert f"python launch.py resume={run_dir} {keys} continues with less memory" in run.stderr
    again = python(
        greedy, f"resume={run_dir}", "sft.micro_batch_size=4", cwd=tmp_path, PYTHONPATH=ROOT
    )
    assert again.returncode == 0, again.stderr
    assert "sft: continues after step 1" in again.stdout


def test_smaller_micro_batches_continue_by_themselves(greedy: Path, tmp_path: Path) -> None:
    run_dir, reduce = tmp_path / "run", "hardware.on_oom=reduce_micro_batch"
    run = python(greedy, *SFT, reduce, f"run_dir={run_dir}", cwd=tmp_path, PYTHONPATH=ROOT)
    assert run.returncode == 0, run.stderr
    told = [line for line in run.stderr.splitlines() if "continuing with smaller" in line]
    assert len(told) == 2, "16, 8, 4"
    assert json.loads((run_dir / "result.json").read_text())["phases"]["sft"]["steps"] == 4
    whole = finished(tmp_path / "whole", "phase=sft", "sft.epochs=0.5")
    losses = [
        [m["sft/loss"] for m in metrics(each) if "sft/loss" in m] for each in (run_dir, whole)
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5), "the same steps up to rounding"
