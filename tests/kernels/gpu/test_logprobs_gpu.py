"""Log-probabilities on a GPU: the traffic of the output layer, and each device's kernel."""

import math
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rlhf.base.types import LogprobOptions
from rlhf.kernels import kernels_for
from rlhf.kernels.gpu import gpu_kernels
from rlhf.kernels.gpu.logprobs_gpu import GpuLogprobKernel
from rlhf.models.output_layer import (
    ALIGNMENT,
    GPU_BLOCK,
    GPU_GRADIENT_BLOCK,
    Block,
    _reduce_block_in_torch,
    _select_logprob_kernel,
    _write_torch_gradient_,
    fused_logprobs,
)
from rlhf.rollout.sampling import SamplingSettings, _select_draw_kernel
from tests.pretend_cuda.gpu import Event, Gpu
from tests.rounding import tolerance

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
V, H, TOKENS = 50272, 2048, 4096  # OPT-1.3B
BLOCKS = TOKENS // GPU_BLOCK.tokens
LOGITS, WEIGHTS, HIDDEN = 2 * TOKENS * V, 2 * V * H, 2 * TOKENS * H  # bytes in bf16
PRODUCTS = {"aten.mm", "aten.addmm_"}
HOSTILE = {"-inf": -math.inf, "nan": math.nan, "inf": math.inf, "-3e4": -3e4, "3e4": 3e4}


class Traffic(TorchDispatchMode):
    """Adds the bytes that operations read and write: those of their arguments and new results."""

    def __init__(self) -> None:
        super().__init__()
        self.products = 0
        self.kernels = 0
        self.others = 0

    def __torch_dispatch__(
        self, operation: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        made = operation(*args, **(kwargs or {}))
        name = str(operation.overloadpacket)
        if not operation.is_view and "empty" not in name:
            moved = moved_bytes(args, kwargs, args[0] if name.endswith("_") else made)
            if name in PRODUCTS:
                self.products += moved
            else:
                self.others += moved
        return made


def moved_bytes(*tree: Any) -> int:
    return sum(leaf.nbytes for leaf in tree_leaves(tree) if isinstance(leaf, Tensor))


class Counted:
    """A kernel that computes nothing; its launches and the bytes it moves are counted."""

    def __init__(self, name: str, gpu: Gpu, traffic: Traffic) -> None:
        self._name = name
        self._gpu = gpu
        self._traffic = traffic

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return self

    def __call__(self, logits_NV: Tensor, *rest: Any, **constants: Any) -> None:
        self._gpu.note(Event.launch, self._name)
        written = logits_NV if self._name == "gradient_kernel" else None
        self._traffic.kernels += moved_bytes(logits_NV, written, rest)


@pytest.fixture
def traffic(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> Traffic:
    traffic = Traffic()
    kernels = SimpleNamespace(
        **{name: Counted(name, gpu, traffic) for name in ("reduce_row_kernel", "gradient_kernel")}
    )
    # They compute nothing, so they are not compared.
    kernel = GpuLogprobKernel(kernels)
    monkeypatch.setattr(kernels_for("cuda"), "logprobs_kernel", lambda _: kernel)
    return traffic


def head(gpu: Gpu, traffic: Traffic) -> None:
    """Compute log-probs, entropies and gradients of an output layer in bf16, without values."""
    with gpu.shapes_only():
        hidden_NH = torch.empty(TOKENS, H, device=GPU, dtype=torch.bfloat16, requires_grad=True)
        weight_VH = torch.empty(V, H, device=GPU, dtype=torch.bfloat16, requires_grad=True)
        ids_N = torch.empty(TOKENS, device=GPU, dtype=torch.int64)
        with traffic:
            fused_logprobs(hidden_NH, weight_VH, None, ids_N).logprobs_N.sum().backward()


def test_learning_moves_less_than_twice_the_products(
    gpu: Gpu, traffic: Traffic, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Products move 4.0 GB: logits twice, and the gradients of hidden states and weights.

    The kernels move 1.2 GB: they read logits, read them again and write their gradient. The other
    operations move 1.2 GB, for gradients of hidden states in fp32. Without kernels they move 25 GB.
    """
    with gpu.counting() as counts:
        head(gpu, traffic)
    slopes = -(-V // (GPU_GRADIENT_BLOCK.vocabulary or V)) * -(-TOKENS // GPU_GRADIENT_BLOCK.tokens)
    assert counts.operations["reduce_row_kernel"] == BLOCKS
    assert counts.operations["gradient_kernel"] == slopes
    assert counts.events[Event.launch] <= 7 * (BLOCKS + slopes) + 20
    assert 3 * LOGITS < traffic.kernels < 3.003 * LOGITS  # and vectors of each launch
    assert traffic.others < 80 * HIDDEN
    # Blocks of all entries and 1024 tokens moved 7.3 GB: a weight's gradient has as many sums.
    assert traffic.products + traffic.kernels + traffic.others < 6.5e9

    monkeypatch.setattr(kernels_for("cuda"), "logprobs_kernel", lambda _: None)
    by_torch = Traffic()
    head(gpu, by_torch)
    assert by_torch.products == traffic.products
    assert by_torch.others > 4 * by_torch.products


@pytest.mark.parametrize("has_bias", [False, True])
def test_rows_of_logits_begin_at_16_bytes(
    gpu: Gpu, has_bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An odd vocabulary is padded on a GPU, which changes no result; not on a CPU."""
    strides = []

    class Kernel:
        def reduce_logits(self, logits_NV: Tensor, *rest: Any, scale: float, outs: Any) -> None:
            strides.append(logits_NV.stride())
            _reduce_block_in_torch(logits_NV, *rest, LogprobOptions(1 / scale), outs)

        def replace_by_gradient_(self, logits_NV: Tensor, *rest: Any, **given: Any) -> None:
            strides.append(logits_NV.stride())
            sums_N, slopes_N = given["log_sums_N"], given["slopes_N"]
            options = LogprobOptions(1 / given["scale"])
            _write_torch_gradient_(logits_NV, *rest, options, sums_N, sums_N, slopes_N, slopes_N)

    monkeypatch.setattr("rlhf.models.output_layer._select_logprob_kernel", lambda _: Kernel())
    generator = torch.Generator().manual_seed(1)
    hidden_NH = torch.randn(5, 8, generator=generator)
    weight_VH = torch.randn(50, 8, generator=generator)
    bias_V = torch.randn(50, generator=generator) if has_bias else None
    found = []
    for device in (CPU, GPU):
        given = [None if x is None else x.to(device) for x in (hidden_NH, weight_VH, bias_V)]
        leaves = [x.requires_grad_() for x in given if x is not None]
        ids_N = torch.arange(5, device=device)
        logprobs_N = fused_logprobs(*given, ids_N, block=Block(4, 23)).logprobs_N
        slopes = torch.autograd.grad(logprobs_N.square().sum(), leaves)
        found.append([x.detach().cpu() for x in (logprobs_N, *slopes)])
    assert {*strides} == {(23, 1), (4, 1), (32, 1), (16, 1)}
    torch.testing.assert_close(*found)


def test_each_device_has_its_kernel_and_only_a_cpu_draws(traffic: Traffic) -> None:
    logits_NV = torch.zeros(2, 3, device=GPU, dtype=torch.bfloat16)
    assert isinstance(_select_logprob_kernel(logits_NV), GpuLogprobKernel)
    assert not isinstance(_select_logprob_kernel(logits_NV.cpu()), GpuLogprobKernel)
    assert gpu_kernels.logprobs_kernel(logits_NV.double()) is None
    plain = SamplingSettings(max_tokens=1, temperature=1.0, top_k=0, top_p=1.0)
    assert _select_draw_kernel(logits_NV, plain) is None


def padded(logits_NV: Tensor) -> Tensor:
    """Copy logits to rows that begin at 16 bytes; the padding is hostile."""
    rows, size = logits_NV.shape
    padded_NP = logits_NV.new_full((rows, size + -size % ALIGNMENT), torch.nan)
    padded_NP[:, :size] = logits_NV
    return padded_NP[:, :size]


def assert_as_torch(kernel: GpuLogprobKernel, logits_NV: Tensor) -> None:
    """Compare with torch's operations in fp64, at every logit that is not finite too.

    In a sum over numbers of size 1 a lane adds few in turn, and then a block has ten levels.
    """
    rounding = tolerance(torch.ones(1), terms=40)
    assert_close = partial(torch.testing.assert_close, atol=rounding, equal_nan=True)
    options = LogprobOptions(temperature=2.0)
    ids_N = torch.arange(len(logits_NV), device=logits_NV.device) - 1  # the first is not here
    ours = torch.full((3, len(ids_N)), 7.0, device=ids_N.device)
    theirs = ours.double()
    kernel.reduce_logits(logits_NV, ids_N, scale=0.5, outs=(ours[0], ours[1], ours[2]))
    _reduce_block_in_torch(logits_NV, ids_N, options, (theirs[0], theirs[1], theirs[2]))
    assert_close(ours.double(), theirs, rtol=rounding)
    sums_N = theirs[0].float()
    slopes_N = torch.linspace(-2, 3, len(ids_N), device=ids_N.device)
    theirs_NV, pull_N = logits_NV.clone(), slopes_N.double()
    ours_NV = logits_NV.clone() if logits_NV.is_contiguous() else padded(logits_NV)
    kernel.replace_by_gradient_(ours_NV, ids_N, scale=0.5, log_sums_N=sums_N, slopes_N=slopes_N)
    _write_torch_gradient_(theirs_NV, ids_N, options, sums_N.double(), pull_N, pull_N, pull_N)
    # Triton's interpreter truncates to bf16.
    assert_close(ours_NV, theirs_NV, rtol=rounding + torch.finfo(logits_NV.dtype).eps)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("size", [50257, 50272])
def test_a_gpu_does_what_operations_of_torch_do(size: int, dtype: torch.dtype) -> None:
    logits_NV = 4 * torch.randn(300, size, device=GPU)
    for row, at in enumerate(HOSTILE.values()):
        logits_NV[row] = logits_NV[row + 20, :3] = logits_NV[row + 40, -3:] = at
    kernel = kernels_for("cuda").logprobs_kernel(logits_NV.to(dtype))
    assert kernel is not None
    for rows_NV in (logits_NV.to(dtype), padded(logits_NV.to(dtype))):
        assert_as_torch(kernel, rows_NV)
