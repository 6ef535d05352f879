"""Softmax of attention scores and its gradient against torch in fp64, on every instruction set."""

import pytest
import torch

from rlhf.kernels.cpu.cpu_layers import softmax_, softmax_gradient_


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(3, 1), (2, 5, 7), (4, 16), (3, 2, 35), (2, 64), (1, 300)])
def test_softmax_and_its_gradient(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(sum(shape))
    scores, slopes = (4 * torch.randn(2, *shape, generator=generator)).to(dtype)
    least = torch.finfo(dtype).min
    scores[..., shape[-1] // 2 + 1 :] = least  # as behind the causal mask
    exact = scores.double().requires_grad_()
    expected = exact.softmax(-1)
    half = dtype is torch.bfloat16
    close = {"atol": 4e-3, "rtol": 8e-3} if half else {"atol": 2e-6, "rtol": 1e-5}
    shares = softmax_(scores.clone())
    torch.testing.assert_close(shares.double(), expected, **close)
    hidden = shares[..., shape[-1] // 2 + 1 :]
    assert (hidden == 0).all()  # not 1e-39: Intel's CPUs multiply denormal numbers slowly

    expected.backward(slopes.double())
    assert exact.grad is not None
    kept = expected.detach().to(dtype)
    found = softmax_gradient_(slopes.clone(), kept, scale=0.25)
    assert (found[..., shape[-1] // 2 + 1 :] == 0).all()
    wide = {"atol": 4e-2, "rtol": 2e-2} if half else {"atol": 1e-5, "rtol": 1e-4}
    torch.testing.assert_close(found.double(), 0.25 * exact.grad, **wide)


@pytest.mark.usefixtures("isa")
def test_a_row_that_is_hidden_as_a_whole_is_shared_equally() -> None:
    scores = torch.full((2, 5), torch.finfo(torch.bfloat16).min, dtype=torch.bfloat16)
    torch.testing.assert_close(softmax_(scores).float(), torch.full((2, 5), 0.2), atol=1e-3, rtol=0)
