"""The kernel for log-probabilities and draws against torch in fp64, on every instruction set."""

import pytest
import torch
from torch import Tensor

from rlhf.base.cpu import Isa
from rlhf.kernels.checked import compare_logprobs
from rlhf.kernels.cpu.cpu_kernels import logprobs_kernel
from rlhf.kernels.cpu.logprobs import LogprobKernel

SHAPES = [(1, 1), (3, 15), (5, 16), (7, 61), (4, 1024), (6, 3001)]


@pytest.fixture(params=[torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
def kernel(request: pytest.FixtureRequest, compiled_isa: Isa) -> LogprobKernel:
    found = logprobs_kernel(torch.empty(0, dtype=request.param))
    if found is None:
        pytest.skip(f"there is no C compiler for {compiled_isa.name}")
    return found


def some_logits(kernel: LogprobKernel, rows: int, size: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rows * size)
    logits_NV = (4 * torch.randn(rows, size, generator=generator)).to(kernel.dtype)
    return logits_NV, torch.randint(0, size, (rows,), generator=generator)


def read(
    kernel: LogprobKernel, logits_NV: Tensor, ids_N: Tensor, *, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Log-sum-exp, entropy and logit of the id; 7 where the id's logit is not written."""
    outs = (torch.empty(len(ids_N)), torch.empty(len(ids_N)), torch.full((len(ids_N),), 7.0))
    kernel.reduce_logits(logits_NV, ids_N, scale=scale, outs=outs)
    return outs


@pytest.mark.parametrize("shape", SHAPES)
def test_it_computes_what_its_checks_compute_in_fp64(
    kernel: LogprobKernel, shape: tuple[int, int]
) -> None:
    """Log-sums, entropies, logits of the ids, and gradients."""
    torch.manual_seed(1)
    *sums, gradients = compare_logprobs(kernel, rows=torch.empty(shape, dtype=kernel.dtype))
    for found_N, expected_N in sums:
        torch.testing.assert_close(found_N.double(), expected_N, atol=5e-5, rtol=1e-5)
    rounding = torch.finfo(kernel.dtype).eps + 2e-5  # the second: of exp in fp32
    found_NV, expected_NV = gradients
    torch.testing.assert_close(found_NV.double(), expected_NV, atol=1e-6, rtol=rounding)


def test_an_id_outside_the_block_is_not_read(kernel: LogprobKernel) -> None:
    logits_NV, _ = some_logits(kernel, 3, 61)
    _, _, picked_N = read(kernel, logits_NV, torch.tensor([-1, 61, 60]), scale=1.0)
    assert picked_N.tolist() == [7.0, 7.0, logits_NV[2, 60].item()]
    ones_N, zeros_N = torch.ones(2), torch.zeros(2)
    slope_NV = torch.zeros(2, 61).to(kernel.dtype)
    ids_N = torch.tensor([-1, 61])
    kernel.replace_by_gradient_(slope_NV, ids_N, scale=1.0, log_sums_N=zeros_N, slopes_N=ones_N)
    assert (slope_NV == -1).all(), "minus p, nowhere 1 - p"


def test_a_token_that_cannot_come_adds_nothing(kernel: LogprobKernel) -> None:
    logits_NV = torch.tensor([[0.0, 0.0, -torch.inf], [torch.nan, 0.0, 0.0]]).to(kernel.dtype)
    logits_NV = torch.cat([logits_NV, torch.full_like(logits_NV[:1], -torch.inf)])
    ids_N = torch.tensor([1, 1, 1])
    sums_3N = torch.stack(read(kernel, logits_NV, ids_N, scale=1.0))
    expected = torch.tensor([0.6931472, 0.6931472, 0.0])  # log 2, entropy log 2
    torch.testing.assert_close(sums_3N[:, 0], expected)
    assert sums_3N[:2, 1].isnan().all(), "what is broken is not hidden"
    assert sums_3N[0, 2].exp() == 0, "a whole block that cannot come"
    assert sums_3N[1, 2].isfinite()
    slope_NV = logits_NV[:1].clone()
    kernel.replace_by_gradient_(
        slope_NV, ids_N[:1], scale=1.0, log_sums_N=sums_3N[0], slopes_N=torch.ones(1)
    )
    torch.testing.assert_close(slope_NV.float(), torch.tensor([[-0.5, 0.5, 0.0]]))


@pytest.mark.parametrize("scale", [1.0, 0.4])
@pytest.mark.parametrize("size", [1, 15, 61, 1024, 3001])
def test_tokens_are_where_their_draws_fall(kernel: LogprobKernel, size: int, scale: float) -> None:
    count = 500
    logits_V = some_logits(kernel, 1, size)[0][0]
    draws_N = torch.rand(count, generator=torch.Generator().manual_seed(size), dtype=torch.float64)
    logits_NV = logits_V.expand(count, -1).contiguous()
    tokens_N, logprobs_N = kernel.draw(logits_NV, draws_N, scale=scale, barred_N=None, end_id=-1)
    logs_V = (logits_V.double() * scale).log_softmax(-1)
    ends_V = logs_V.exp().cumsum(-1)
    starts_V = torch.cat([torch.zeros(1), ends_V[:-1]])
    slack = 1e-6  # of sums in fp32
    assert (starts_V[tokens_N] - slack <= draws_N).all()
    assert (draws_N <= ends_V[tokens_N] + slack).all()
    torch.testing.assert_close(logprobs_N.double(), logs_V[tokens_N], atol=2e-5, rtol=1e-6)
    assert size < 61 or len(set(tokens_N.tolist())) > 5


def test_barred_rows_cannot_end_and_its_share_counts_still(kernel: LogprobKernel) -> None:
    size, end, count = 61, 7, 400
    logits_V = some_logits(kernel, 1, size)[0][0]
    logits_V[end] = 12.0  # nearly certain
    barred_N = torch.arange(count) % 2 == 0
    draws_N = torch.rand(count, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    logits_NV = logits_V.expand(count, -1).contiguous()
    tokens_N, logprobs_N = kernel.draw(logits_NV, draws_N, scale=1.0, barred_N=barred_N, end_id=end)
    assert not (tokens_N[barred_N] == end).any()
    assert (tokens_N[~barred_N] == end).float().mean() > 0.8
    logs_V = logits_V.double().log_softmax(-1)
    torch.testing.assert_close(logprobs_N.double(), logs_V[tokens_N], atol=2e-5, rtol=1e-6)
