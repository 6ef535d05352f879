"""A phase that needs too much memory: what the run says, and how it goes on by itself."""

import json
from pathlib import Path

import pytest
import torch

from rlhf.config.choices import Phase, When
from rlhf.config.freeze import to_run_config
from rlhf.config.schema.run import RunConfig
from rlhf.runtime.out_of_memory import (
    OutOfMemoryError,
    explain_out_of_memory,
    is_out_of_memory,
    with_less_memory,
)
from tests.conftest import Compose
from tests.runs import ROOT, TINY_RUN, finished, launch, metrics

pytestmark = pytest.mark.slow


LONG = ["phase=sft", "sft.batch_size=16", "sft.epochs=0.5"]
SFT = [*TINY_RUN, *LONG, "checkpoint.every_steps=1"]
SFT += ["plan=check", "tracking.others=[tests.killer:Greedy]"]


# torch's own class aside, these are the forms of a failed allocation on a GPU.
TEXTS = [
    torch.AcceleratorError("CUDA error: out of memory"),
    RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported"),
    RuntimeError("CUDA driver error: out of memory"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`"),
    RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
    RuntimeError('NVML_SUCCESS == r INTERNAL ASSERT FAILED at "CUDACachingAllocator.cpp":1131'),
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


def test_the_message_names_keys_and_smaller_micro_batches_continue(tmp_path: Path) -> None:
    """Micro-batches above 4 have no room: the user halves the first, the run itself the second."""
    run_dir = tmp_path / "run"
    run = launch(*SFT, f"run_dir={run_dir}", cwd=tmp_path, PYTHONPATH=ROOT)
    assert run.returncode == 2
    assert run.stderr.startswith("error: sft: out of memory with sft.micro_batch_size=16 (planned:")
    assert "GiB per rank): " in run.stderr
    assert "can't allocate memory: you tried to allocate" in run.stderr
    keys = "sft.micro_batch_size=8"
    assert f"rlhf resume={run_dir} {keys} continues with less memory" in run.stderr

    words = [f"resume={run_dir}", keys, "hardware.on_oom=reduce_micro_batch"]
    again = launch(*words, cwd=tmp_path, PYTHONPATH=ROOT)
    assert again.returncode == 0, again.stderr
    assert "sft: continues after step 1" in again.stdout
    assert again.stderr.count("continuing with smaller") == 1, "4"
    processes = (run_dir / "processes.txt").read_text().split()
    assert len(processes) == len(set(processes)) == 3, "each attempt is a process of its own"
    assert json.loads((run_dir / "result.json").read_text())["phases"]["sft"]["steps"] == 4
    whole = finished(tmp_path / "whole", *LONG)
    losses = [
        [m["sft/loss"] for m in metrics(each) if "sft/loss" in m] for each in (run_dir, whole)
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5), "the same steps up to rounding"


def explained(config: RunConfig, phase: Phase, folder: Path) -> str:
    """What is said of an allocation that fails in a phase."""
    with pytest.raises(OutOfMemoryError) as told, explain_out_of_memory(config, phase, folder):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
    return str(told.value)


@pytest.mark.parametrize(
    ("words", "keys"),
    [
        (["hardware=a100_40g", "zero=stage1"], "ppo.micro_batch_size=1 zero=stage2_offload"),
        (["hardware=8xa100_40g", "zero=stage1"], "ppo.micro_batch_size=1 zero=stage3"),
        (["hardware=8xa100_40g", "zero=stage3"], "ppo.micro_batch_size=1 zero=stage3_offload"),
        (["hardware=8xa100_40g", "zero=stage3_offload"], "ppo.micro_batch_size=1"),
        (
            ["hardware=a100_40g", "zero=stage2_offload", "rollout.keep_graphs=always"],
            "ppo.micro_batch_size=1 rollout.keep_graphs=never",
        ),
    ],
    ids=str,
)
def test_the_keys_that_help_are_those_of_the_machine(
    words: list[str], keys: str, compose: Compose, tmp_path: Path
) -> None:
    config = to_run_config(compose(["ppo.micro_batch_size=2", *words]))
    told = explained(config, Phase.ppo, tmp_path)
    assert f"resume={tmp_path} {keys} continues with less memory" in told


def test_one_rank_of_a_cpu_is_told_no_second_node(compose: Compose, tmp_path: Path) -> None:
    config = to_run_config(compose(["sft.micro_batch_size=1"]))
    told = explained(config, Phase.sft, tmp_path)
    assert "hardware.nodes" not in told
    assert "model.gradient_checkpointing=true" in told


def test_a_retry_keeps_no_graphs_and_with_all_sizes_at_one_there_is_none(compose: Compose) -> None:
    words = ["hardware.on_oom=reduce_micro_batch", "hardware=a100_40g"]
    words += ["rollout.keep_graphs=always", "rollout.max_rows=2"]
    words += [f"{phase}.micro_batch_size=1" for phase in ("sft", "reward", "ppo")]
    fewer_rows = with_less_memory(to_run_config(compose(words)))
    assert (fewer_rows.rollout.keep_graphs, fewer_rows.rollout.max_rows) == (When.never, 1)
    assert with_less_memory(fewer_rows) is None
