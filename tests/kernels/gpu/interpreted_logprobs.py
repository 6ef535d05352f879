"""logprobs_triton.py by Triton's interpreter, on a CPU; test_triton.py starts this file.

The kernels pass the tests of the C kernel, here with blocks of 1024 logits.
"""

from typing import Any

import pytest
import torch

from rlhf.base.types import LogprobOptions
from rlhf.gpu_check import kernels as gpu_check_kernels
from rlhf.gpu_check.rows import RowVerdict
from rlhf.kernels.gpu import gpu_kernels, logprobs_triton
from rlhf.kernels.gpu import logprobs_gpu as logprobs
from rlhf.kernels.gpu.logprobs_gpu import GpuLogprobKernel
from rlhf.models import output_layer
from rlhf.models.output_layer import Block, fused_logprobs
from tests.kernels.cpu.test_logprobs import (  # noqa: F401
    read,
    some_logits,
    test_a_token_that_cannot_come_adds_nothing,
    test_an_id_outside_the_block_is_not_read,
)
from tests.kernels.gpu.test_logprobs_gpu import HOSTILE, assert_as_torch, padded
from tests.models.test_output_layer import layer, plainly, slopes
from tests.rounding import assert_near

DTYPES = [torch.bfloat16, torch.float32]
SIZE = 1024

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")  # NumPy's: log 0


class Kernel(GpuLogprobKernel):
    """The kernel for logits of one type, as LogprobKernel is."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__(logprobs_triton)
        self.dtype = dtype


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logprobs, "BLOCK", SIZE)


@pytest.fixture(params=DTYPES, ids=["bf16", "fp32"])
def kernel(request: pytest.FixtureRequest) -> Kernel:
    return Kernel(request.param)


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize("size", [SIZE - 1, 2 * SIZE + 1])
def test_they_do_what_operations_of_torch_do(kernel: Kernel, size: int, name: str) -> None:
    """What is hostile is in the first block, in the last, or everywhere."""
    at = HOSTILE[name]
    logits_NV, _ = some_logits(kernel, 4, size)
    logits_NV[0, :3] = logits_NV[1, -3:] = at
    logits_NV[2, : min(SIZE, size)] = at
    logits_NV[3] = at
    assert_as_torch(kernel, logits_NV)
    assert_as_torch(kernel, padded(logits_NV))


@pytest.mark.parametrize("ends", [(-60.0, 60.0), (60.0, -60.0)])
def test_each_block_may_have_a_larger_logit(kernel: Kernel, ends: tuple[float, float]) -> None:
    assert_as_torch(kernel, torch.linspace(*ends, 3001)[None].to(kernel.dtype))


def test_the_output_layer_by_them(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = Kernel(torch.float32)
    monkeypatch.setattr(output_layer, "_select_logprob_kernel", lambda logits: kernel)
    given = layer(dtype=torch.float32)
    found = fused_logprobs(*given, LogprobOptions(0.6), block=Block(4, 7))
    expected = plainly(given, 0.6)
    terms = given.weight_VH.numel()
    assert_near([x.detach().double() for x in found], [*expected], terms=terms, dtype=torch.float32)
    pull_N = torch.linspace(-1, 1, len(given.ids_N))
    ours, theirs = (slopes(given, (pull_N * x).sum()) for x in (found.logprobs_N, expected[0]))
    assert_near(ours, theirs, terms=terms)


@pytest.mark.parametrize("factor", [1.0, 1.01])
def test_gpu_check_tells_a_wrong_kernel(factor: float, monkeypatch: pytest.MonkeyPatch) -> None:
    reduce_logits = GpuLogprobKernel.reduce_logits

    def scaled(self: GpuLogprobKernel, *given: Any, scale: float, outs: Any) -> None:
        reduce_logits(self, *given, scale=factor * scale, outs=outs)

    monkeypatch.setattr(GpuLogprobKernel, "reduce_logits", scaled)
    monkeypatch.setattr(gpu_check_kernels, "GPU", torch.device("cpu"))
    monkeypatch.setattr(gpu_check_kernels, "kernels_for", lambda _: gpu_kernels)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    found = gpu_check_kernels._check_logprobs(3, 300, torch.float32)
    assert found.verdict is (RowVerdict.passed if factor == 1.0 else RowVerdict.failed)
