"""Every instruction set that this CPU has computes the same; without kernels, torch does.

test_decode.py has the steps of a forward pass.
"""

import pytest
import torch
from torch import Tensor, nn

from rlhf.base.cpu import Isa
from rlhf.config.choices import Dtype
from rlhf.engine.split_adamw import SplitAdamW
from rlhf.kernels.cpu.compiling import KERNELS, load_kernel
from rlhf.rollout.sampling import SamplingSettings, draw_tokens


def numbers(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_the_kernels_of_a_level_run(isa: Isa) -> None:
    for name, needed in KERNELS.items():
        assert (load_kernel(name, isa).library is not None) is (isa >= needed), load_kernel(
            name, isa
        ).reason


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
