"""The Triton kernels without a GPU, and a GPU without Triton.

Triton is part of the tests' environment, in the version that the pinned torch requires on GPUs.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from rlhf.options.gpu_kernels import adamw_gpu, attention_gpu, logprobs_gpu
from rlhf.options.gpu_kernels.attention_gpu import GpuAttention
from tests.runs import python


def attention(device: torch.device) -> GpuAttention | None:
    return attention_gpu.load_gpu_attention.__wrapped__(device, torch.bfloat16, group=1, size=64)


@pytest.mark.parametrize(
    "load",
    [
        adamw_gpu.load_adamw_gpu_kernels.__wrapped__,
        logprobs_gpu.load_logprobs_gpu_kernels.__wrapped__,
        attention,
    ],
)
def test_without_triton_a_line_says_so(
    load: Callable[[torch.device], object],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    for name in ("adamw_triton", "attention_triton", "logprobs_triton"):
        monkeypatch.delitem(sys.modules, f"rlhf.options.gpu_kernels.{name}", raising=False)
    with caplog.at_level(logging.WARNING):
        assert load(torch.device("cuda", 0)) is None
    assert len(caplog.messages) == 1
    assert "No Triton for this GPU (" in caplog.text
    assert "\n" not in caplog.messages[0]


@pytest.mark.slow
def test_the_kernels_compute_what_they_should() -> None:
    run = python("-m", "tests.options.gpu_kernels.interpreted", TRITON_INTERPRET=1)
    assert run.returncode == 0, run.stdout


@pytest.mark.slow
def test_the_kernels_compile_for_gpus(tmp_path: Path) -> None:
    run = python("-m", "tests.options.gpu_kernels.compile_kernels", TRITON_CACHE_DIR=tmp_path)
    assert run.returncode == 0, run.stderr
