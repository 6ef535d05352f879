"""Every instruction set that this CPU has computes the same; without kernels, torch does.

test_decode.py has the steps of a forward pass.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from rlhf.base.cpu import MAX_ISA, Isa, read_cpu, usable_isa
from rlhf.base.types import LogprobOptions
from rlhf.config.choices import Dtype
from rlhf.engine.split_adamw import SplitAdamW
from rlhf.models.output_layer import fused_logprobs
from rlhf.options.cpu_kernels.compiling import KERNELS, load_kernel
from rlhf.rollout.decoders.projections import build_fastest_projection
from rlhf.rollout.sampling import SamplingSettings, draw_tokens

HALF = {"atol": 1e-2, "rtol": 1e-2}  # bf16 keeps 8 bits


@pytest.fixture(params=[level for level in Isa if level <= read_cpu().isa], ids=lambda x: x.name)
def isa(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Isa:
    """One level after another, up to this CPU's own."""
    monkeypatch.setenv(MAX_ISA, request.param.name)
    assert usable_isa() is request.param
    return request.param


def numbers(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_the_kernels_of_a_level_run(isa: Isa) -> None:
    for name, needed in KERNELS.items():
        assert (load_kernel(name, isa).library is not None) is (isa >= needed), load_kernel(
            name, isa
        ).reason


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("rows", [1, 15, 33])
@pytest.mark.parametrize(("outputs", "inputs"), [(64, 32), (100, 96), (7, 64)])
def test_projections(outputs: int, inputs: int, rows: int, dtype: torch.dtype) -> None:
    weight = (numbers(outputs, inputs, seed=1) / 8).to(dtype)
    bias, x = numbers(outputs, seed=2).to(dtype), numbers(rows, inputs, seed=3).to(dtype)
    other = numbers(rows, outputs, seed=4).to(dtype)
    expected = functional.linear(x.float(), weight.float(), bias.float())
    layer = build_fastest_projection(weight, bias, None)
    with torch.no_grad():
        torch.testing.assert_close(layer(x).float(), expected, **HALF)
        torch.testing.assert_close(
            layer.project_and_add(x, other).float(), expected + other.float(), **HALF
        )
        torch.testing.assert_close(
            layer.project_and_multiply(x, other).float(), expected * other.float(), **HALF
        )
        relu = build_fastest_projection(weight, bias, "relu")(x).float()
        torch.testing.assert_close(relu, expected.relu(), **HALF)


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_and_their_gradient(temperature: float, dtype: torch.dtype) -> None:
    hidden_NH, weight_VH = numbers(9, 32, seed=1).to(dtype), numbers(61, 32, seed=2).to(dtype)
    ids_N = torch.arange(9) * 7 % 61
    half_NH = hidden_NH.clone().requires_grad_()
    found = fused_logprobs(half_NH, weight_VH, None, ids_N, LogprobOptions(temperature=temperature))
    found.logprobs_N.sum().backward()
    exact_NH = hidden_NH.double().requires_grad_()
    logits_NV = (exact_NH @ weight_VH.double().T).to(dtype).double() / temperature
    logs_NV = ((exact_NH @ weight_VH.double().T) / temperature).log_softmax(-1)
    logs_NV.gather(1, ids_N[:, None]).sum().backward()
    expected_N = logits_NV.log_softmax(-1).gather(1, ids_N[:, None])[:, 0]
    half = dtype is torch.bfloat16
    value, slope = ((0.2, 0.02), (0.2, 0.05)) if half else ((1e-4, 1e-5), (1e-4, 1e-4))
    close = torch.testing.assert_close
    close(found.logprobs_N.double(), expected_N, atol=value[0], rtol=value[1])
    assert half_NH.grad is not None
    assert exact_NH.grad is not None
    close(half_NH.grad.double(), exact_NH.grad, atol=slope[0], rtol=slope[1])


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_draws(dtype: torch.dtype) -> None:
    logits_BV = (3 * numbers(40, 61, seed=1)).to(dtype)
    draws_B = torch.rand(40, generator=torch.Generator().manual_seed(2))
    drawn = draw_tokens(
        logits_BV, draws_B, SamplingSettings(max_tokens=1, temperature=0.7, top_k=0, top_p=1.0)
    )
    logs_BV = (logits_BV.double() / 0.7).log_softmax(-1)
    ends_BV = logs_BV.exp().cumsum(-1)
    expected_B = torch.searchsorted(ends_BV, draws_B.double()[:, None])[:, 0]
    assert torch.equal(drawn.tokens_B, expected_B)
    expected = logs_BV.gather(1, expected_B[:, None])[:, 0]
    torch.testing.assert_close(drawn.logprobs_B.double(), expected, atol=2e-5, rtol=1e-5)


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("moments", [Dtype.fp32, Dtype.bf16])
def test_adamw(moments: Dtype) -> None:
    start = 0.1 * numbers(50, 7, seed=1)
    lean, plain = nn.Parameter(start.clone()), nn.Parameter(start.clone())
    kept = torch.float32 if moments is Dtype.fp32 else torch.bfloat16
    groups = [{"params": [lean], "lr": 1e-2, "weight_decay": 0.1}]
    ours = SplitAdamW(groups, betas=(0.9, 0.95), eps=1e-8, moments=kept)
    theirs = torch.optim.AdamW([plain], lr=1e-2, weight_decay=0.1, betas=(0.9, 0.95))
    for seed in range(3):
        gradient = numbers(50, 7, seed=seed).bfloat16()
        lean.grad, plain.grad = gradient, gradient.float()
        assert ours.grad_norm() == pytest.approx(float(gradient.double().norm()), rel=1e-5)
        ours.step()
        theirs.step()
    torch.testing.assert_close(lean.float(), plain.detach(), atol=2e-3, rtol=1e-2)
