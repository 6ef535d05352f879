"""The AdamW kernel on numbers that fp32 holds exactly, and its sum of squares."""

import pytest
import torch
from torch import Tensor

from rlhf.kernels.cpu.adamw import AdamwKernel, load_adamw_kernel
from rlhf.kernels.torch_adamw import AdamwScalars, SplitState

KERNEL = load_adamw_kernel()
pytestmark = pytest.mark.skipif(KERNEL is None, reason="no C compiler")
STILL = AdamwScalars(
    scale=1.0, lr=0.0, beta1=0.5, beta2=0.75, eps=1.0, decay=0.0, correction1=1.0, correction2=1.0
)


@pytest.fixture
def kernel() -> AdamwKernel:
    assert KERNEL is not None
    return KERNEL


def split_of(weights: Tensor, moments: torch.dtype = torch.float32) -> SplitState:
    """These fp32 weights, whose upper halves are bf16 numbers, and moments of 0."""
    bits = weights.view(torch.int32)
    low = bits.to(torch.int16)
    high = (bits - low.int()).view(torch.float32).bfloat16()
    return SplitState(high, low, *torch.zeros(2, weights.numel(), dtype=moments))


def weights_of(split: SplitState) -> Tensor:
    bits = split.high.float().view(torch.int32) + split.low.int()
    return bits.view(torch.float32)


def numbers(size: int, seed: int = 0) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


def test_one_step_by_hand(kernel: AdamwKernel) -> None:
    """Gradient 4 * 0.5 = 2: moments 1 and 1, corrected 2 and 4; 3 * 0.5 - 0.5 * 2 / (2 + 2)."""
    step = AdamwScalars(
        scale=0.5,
        lr=0.5,
        beta1=0.5,
        beta2=0.75,
        eps=2.0,
        decay=1.0,
        correction1=0.5,
        correction2=0.25,
    )
    split = split_of(torch.tensor([3.0]))
    kernel.step([split], [torch.tensor([4.0]).bfloat16()], [step])
    assert (split.first.item(), split.second.item()) == (1.0, 1.0)
    assert weights_of(split).item() == 1.25


@pytest.mark.parametrize("size", [1, 15, 16, 17, 1000, 70_001])
def test_half_moments_are_rounded_to_the_nearest_even(kernel: AdamwKernel, size: int) -> None:
    """With betas of 1/2 and 3/4 every result is exact in fp32, and many are ties."""
    split = split_of(numbers(size), torch.bfloat16)
    first, second = numbers(size, 1).bfloat16(), numbers(size, 2).abs().bfloat16()
    split.first.copy_(first)
    split.second.copy_(second)
    gradient = numbers(size, 3).bfloat16()
    kernel.step([split], [gradient], [STILL])
    mean = (0.5 * first.double() + 0.5 * gradient.double()).bfloat16()
    square = (0.75 * second.double() + 0.25 * gradient.double() ** 2).float().bfloat16()
    assert torch.equal(split.first, mean)
    assert torch.equal(split.second, square)


def test_weights_come_back_bit_by_bit(kernel: AdamwKernel) -> None:
    """Every low half below upper halves of both parities and signs, with a rate of 0."""
    upper = torch.tensor([0x3F80, 0x3F81, 0xBF80 - 0x10000, 0xBF81 - 0x10000], dtype=torch.int32)
    bits = (upper[:, None] * 65536 + torch.arange(65536, dtype=torch.int32)).flatten()
    split = split_of(bits.view(torch.float32))
    before = SplitState(*(part.clone() for part in split))
    kernel.step([split], [numbers(bits.numel()).bfloat16()], [STILL])
    assert torch.equal(weights_of(split).view(torch.int32), bits)
    assert torch.equal(split.high, before.high)
    assert torch.equal(split.low, before.low)


def test_a_gradient_may_lie_transposed(kernel: AdamwKernel) -> None:
    gradient = numbers(6).bfloat16().view(2, 3)
    split = split_of(torch.ones(6))
    kernel.step([split], [gradient.t().contiguous().t()], [STILL])
    assert torch.equal(split.first, 0.5 * gradient.float().flatten())
    assert kernel.sum_of_squares([gradient.t()]) == pytest.approx(
        gradient.double().square().sum().item()
    )


@pytest.mark.parametrize("size", [1, 4095, 4096, 4097, 65_536, 200_003])
def test_squares_are_summed(kernel: AdamwKernel, size: int) -> None:
    gradient = numbers(size).bfloat16()
    expected = gradient.double().square().sum().item()
    assert kernel.sum_of_squares([gradient]) == pytest.approx(expected, rel=1e-6)
