"""The Triton kernels by Triton's interpreter, on a CPU; test_triton.py starts this file.

They pass the tests of the C kernel and of SplitAdamW. The tensors that they work on are longer than
a part, which is here one block or two.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

from rlhf.engine import split_adamw as lean_adamw
from rlhf.gpu_check import kernels as gpu_check_kernels
from rlhf.gpu_check.rows import RowVerdict
from rlhf.kernels.gpu import adamw_gpu, adamw_triton, gpu_kernels
from rlhf.kernels.gpu.adamw_gpu import BLOCK, ParameterTable
from rlhf.kernels.torch_adamw import AdamwScalars, SplitState, TorchAdamw
from rlhf.options.average import moving_average
from tests.kernels.cpu.test_adamw import (  # noqa: F401
    numbers,
    split_of,
    test_half_moments_are_rounded_to_the_nearest_even,
    test_one_step_by_hand,
    test_squares_are_summed,
    test_weights_come_back_bit_by_bit,
    weights_of,
)
from tests.kernels.cpu.test_split_adamw import (  # noqa: F401
    test_a_gradient_that_is_not_finite_shows_in_the_norm,
    test_parameters_without_gradient_stay,
    test_the_average_is_exact_and_so_is_the_way_back,
)
from tests.kernels.gpu.test_adamw_gpu import SCALARS
from tests.rounding import assert_near

CPU = torch.device("cpu")


def table_of(sizes: list[int], blocks: int = 2) -> ParameterTable:
    return ParameterTable(adamw_triton, sizes, CPU, chunk=blocks * adamw_gpu.BLOCK)


class Kernel:
    """The functions of the C kernel."""

    def step(
        self, states: list[SplitState], gradients: list[Tensor], numbers: list[AdamwScalars]
    ) -> None:
        table_of([each.numel() for each in gradients]).step(states, gradients, numbers)

    def sum_of_squares(self, gradients: list[Tensor]) -> float:
        return float(
            table_of([each.numel() for each in gradients], blocks=1).sum_of_squares(gradients)
        )


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    """With blocks of a size that the interpreter, which is slow by block, finishes soon."""
    monkeypatch.setattr(adamw_gpu, "BLOCK", 8 * BLOCK)
    return Kernel()


@pytest.fixture
def way(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    def table(tensors: list[Tensor], _moments: torch.dtype | None = None) -> ParameterTable:
        return table_of([tensor.numel() for tensor in tensors])

    monkeypatch.setattr(lean_adamw, "_select_adamw", table)
    monkeypatch.setattr(
        moving_average, "build_average_kernel", lambda shards: table([each.high for each in shards])
    )


@pytest.mark.parametrize(("moments", "shift"), [(torch.float32, 1), (torch.bfloat16, 0)])
def test_they_do_what_operations_of_torch_do(moments: torch.dtype, shift: int) -> None:
    """On several parameters at once, and on data that does not begin at a multiple of 16 bytes."""
    sizes = [1, BLOCK, 3 * BLOCK + 500, 7]
    ours = [split_of(numbers(size + shift, size), moments) for size in sizes]
    ours = [SplitState(*(part[shift:] for part in split)) for split in ours]
    theirs = [SplitState(*(part.clone() for part in split)) for split in ours]
    table = table_of(sizes)
    for seed in range(2):
        gradients = [numbers(size, seed).bfloat16() for size in sizes]
        table.step(ours, gradients, [SCALARS] * len(sizes))
        TorchAdamw().step(theirs, gradients, [SCALARS] * len(sizes))
    for one, other in zip(ours, theirs, strict=True):
        assert_near(weights_of(one), weights_of(other), terms=20)  # 2 steps of 10 operations
        assert_near(one[2:], other[2:], terms=20, dtype=moments)


def test_positions_need_64_bits() -> None:
    """In a parameter of 2^33 weights, of which only the last part has memory."""
    skipped, size = 2**33, 1500
    split = split_of(numbers(size))
    expected = SplitState(*(part.clone() for part in split))
    gradient = numbers(size, 1).bfloat16()
    table = table_of([size])
    table.step([expected], [gradient], [SCALARS])

    table._chunks = torch.tensor([[0, skipped, skipped + size]])
    found = table._collect_addresses

    def shifted(*columns: list[Tensor]) -> tuple[Tensor, int]:
        addresses, align = found(*columns)
        widths = [column[0].element_size() for column in columns]
        return addresses - skipped * torch.tensor([widths]), align

    table._collect_addresses = shifted
    assert (
        table.sum_of_squares([gradient]).item()
        == table_of([size]).sum_of_squares([gradient]).item()
    )
    table.step([split], [gradient], [SCALARS])
    assert all(torch.equal(one, other) for one, other in zip(split, expected, strict=True))


@pytest.mark.parametrize("value", [None, torch.nan])
def test_gpu_check_tells_a_kernel_that_gives_nan(
    value: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = ParameterTable.step

    def spoiled(table: ParameterTable, states: list[SplitState], *rest: Any) -> None:
        step(table, states, *rest)
        if value is not None:
            states[0].first[3] = value

    monkeypatch.setattr(ParameterTable, "step", spoiled)
    monkeypatch.setattr(gpu_check_kernels, "GPU", CPU)
    monkeypatch.setattr(gpu_check_kernels, "kernels_for", lambda _: gpu_kernels)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    found = gpu_check_kernels._check_adamw((300, 1), torch.float32)
    assert found.verdict is (RowVerdict.passed if value is None else RowVerdict.failed)
