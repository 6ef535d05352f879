"""The Triton kernels without a GPU, and a GPU without Triton.

Triton is part of the tests' environment, in the version that the pinned torch requires on GPUs.
"""

import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from rlhf.kernels import gpu as gpu_kernels
from rlhf.kernels import kernels_for
from tests.pretend_cuda.gpu import Gpu
from tests.runs import python

GPU = torch.device("cuda", 0)


@pytest.mark.parametrize("is_there", [False, True])
@pytest.mark.parametrize(
    "load",
    [
        lambda kernels: kernels.adamw_kernel([5], GPU, torch.float32),
        lambda kernels: kernels.average_kernel([5], GPU),
        lambda kernels: kernels.logprobs_kernel(torch.ones(2, 3, device=GPU)),
        lambda kernels: kernels.attention_kernel(torch.ones(2, 2, 1, 4, 16, device=GPU), 1),
    ],
    ids=["adamw", "average", "logprobs", "attention"],
)
def test_without_triton_or_its_driver_a_line_says_so(
    load: Callable[[Any], object],
    is_there: bool,
    gpu: Gpu,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    if not is_there:
        monkeypatch.setitem(sys.modules, "triton", None)
        for name in ("adamw_triton", "attention_triton", "logprobs_triton"):
            monkeypatch.delitem(sys.modules, f"rlhf.kernels.gpu.{name}", raising=False)
            monkeypatch.delattr(gpu_kernels, name, raising=False)
    with caplog.at_level(logging.WARNING):
        assert [load(kernels_for("cuda")) for _ in range(2)] == [None, None]
    (line,) = caplog.messages
    assert line.startswith("kernels: torch replaces ")
    assert is_there or "(import of triton halted" in line
    assert "\n" not in line


@pytest.mark.slow
def test_the_kernels_compute_what_they_should() -> None:
    run = python("-m", "tests.kernels.gpu.interpreted", TRITON_INTERPRET=1)
    assert run.returncode == 0, run.stdout


@pytest.mark.slow
def test_the_kernels_compile_for_gpus(tmp_path: Path) -> None:
    run = python("-m", "tests.kernels.gpu.compile_kernels", TRITON_CACHE_DIR=tmp_path)
    assert run.returncode == 0, run.stderr
