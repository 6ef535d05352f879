"""AdamW on split masters: against torch's, with the kernel and without; nothing is lost."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rlhf.engine.split_adamw import SplitAdamW
from rlhf.kernels import torch_adamw
from rlhf.kernels.cpu import cpu_kernels
from rlhf.kernels.cpu.adamw import load_adamw_kernel
from rlhf.kernels.torch_adamw import Split, fp32_weights
from rlhf.options.average.moving_average import MovingAverage

SHAPES = [(61, 37), (7,), (3, 5, 2), (1,), (300, 301)]  # above 65536 threads share the numbers
BETAS = (0.9, 0.95)


@pytest.fixture(params=["kernel", "torch"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the kernel, and by operations of torch in several chunks."""
    if request.param == "torch":
        monkeypatch.setattr(cpu_kernels, "load_adamw_kernel", lambda: None)
        monkeypatch.setattr(torch_adamw, "CHUNK", 1000)
    elif load_adamw_kernel() is None:
        pytest.skip("no C compiler")


def parameters(seed: int = 0) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [nn.Parameter(0.1 * torch.randn(shape, generator=generator)) for shape in SHAPES]


def groups(trained: list[nn.Parameter]) -> list[dict[str, Any]]:
    """Two groups, each with its own rate and decay."""
    return [
        {"params": trained[:3], "lr": 1e-2, "weight_decay": 0.1},
        {"params": trained[3:], "lr": 3e-3, "weight_decay": 0.0},
    ]


def lean_of(trained: list[nn.Parameter], moments: torch.dtype = torch.float32) -> SplitAdamW:
    return SplitAdamW(groups(trained), betas=BETAS, eps=1e-8, moments=moments)


def set_gradients(trained: list[nn.Parameter], same: list[nn.Parameter], *, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter, other in zip(trained, same, strict=True):
        gradient = torch.randn(parameter.shape, generator=generator).bfloat16()
        parameter.grad, other.grad = gradient, gradient.to(other.dtype)


def masters(optimizer: SplitAdamW) -> list[Tensor]:
    return [fp32_weights(shard) for shard in optimizer.masters.shards]


@pytest.mark.usefixtures("way")
def test_twenty_steps_are_those_of_torch_on_fp32_weights() -> None:
    trained, whole = parameters(), parameters()
    lean, reference = lean_of(trained), torch.optim.AdamW(groups(whole), betas=BETAS, eps=1e-8)
    for step in range(20):
        set_gradients(trained, whole, seed=step)
        norm = torch.nn.utils.clip_grad_norm_(whole, 1.0)
        assert lean.grad_norm() == pytest.approx(norm.item(), rel=1e-5)
        for optimizer in (lean, reference):
            optimizer.param_groups[0]["lr"] = 1e-2 / (step + 1)
        lean.step(scale=1.0 / (norm.item() + 1e-6))
        lean.zero_grad()
        reference.step()
    for got, parameter, expected in zip(masters(lean), trained, whole, strict=True):
        torch.testing.assert_close(got, expected.detach().flatten(), atol=2e-7, rtol=1e-6)
        assert parameter.dtype is torch.bfloat16
        assert parameter.grad is None
        torch.testing.assert_close(parameter.flatten().float(), got, atol=0.0, rtol=2**-8)


@pytest.mark.usefixtures("way")
def test_parameters_without_gradient_stay() -> None:
    trained = parameters()
    lean = lean_of(trained)
    before = masters(lean)
    assert lean.grad_norm() == 0.0
    trained[0].grad = torch.full(SHAPES[0], 2.0).bfloat16()
    assert lean.grad_norm() == pytest.approx(2.0 * (61 * 37) ** 0.5)
    lean.step()
    assert not torch.equal(masters(lean)[0], before[0])
    assert all(
        torch.equal(now, old) for now, old in zip(masters(lean)[1:], before[1:], strict=True)
    )


@pytest.mark.usefixtures("way")
def test_a_gradient_that_is_not_finite_shows_in_the_norm() -> None:
    trained = parameters()
    lean = lean_of(trained)
    trained[0].grad = torch.zeros(SHAPES[0]).bfloat16()
    for value in (float("nan"), float("inf")):
        trained[0].grad[60, 36] = value
        assert not math.isfinite(lean.grad_norm())


def some_masters() -> tuple[SplitAdamW, MovingAverage, Tensor]:
    """An optimiser and its average after some steps, and the masters' own average."""
    trained, same = parameters(), parameters()
    lean = lean_of(trained)
    average = MovingAverage(lean.masters, beta=0.75)
    expected = torch.cat(masters(lean))
    for step in range(4):
        set_gradients(trained, same, seed=step)
        lean.step()
        average.update()
        expected = 0.75 * expected + 0.25 * torch.cat(masters(lean))
    return lean, average, expected


@pytest.mark.usefixtures("way")
def test_the_average_is_exact_and_so_is_the_way_back() -> None:
    lean, average, expected = some_masters()
    before = masters(lean)
    for _ in range(2):  # the average survives too
        with average.swap_in():
            torch.testing.assert_close(torch.cat(masters(lean)), expected, atol=1e-7, rtol=1e-6)
            shown = lean.param_groups[0]["params"][0].float().flatten()
            torch.testing.assert_close(shown, masters(lean)[0], atol=0.0, rtol=2**-8)
        assert all(torch.equal(now, old) for now, old in zip(masters(lean), before, strict=True))
    assert not torch.equal(torch.cat(before), expected)


def test_splitting_loses_nothing_and_rounds_to_the_nearest() -> None:
    """Every low half below upper halves of both parities and signs."""
    upper = torch.tensor([0x3F80, 0x3F81, 0xBF80 - 0x10000, 0xBF81 - 0x10000], dtype=torch.int32)
    bits = (upper[:, None] * 65536 + torch.arange(65536, dtype=torch.int32)).flatten()
    split = Split(
        torch.empty(bits.numel(), dtype=torch.bfloat16),
        torch.empty(bits.numel(), dtype=torch.int16),
    )
    split.split(bits.view(torch.float32).clone())
    assert torch.equal(fp32_weights(split).view(torch.int32), bits)
    usual = bits.view(torch.float32).bfloat16()
    differs = (usual != split.high).nonzero().flatten()
    assert torch.equal(differs % 65536, torch.full((2,), 0x8000))  # ties below an even half
    assert (split.high.float().abs() > usual.float().abs())[differs].all()
