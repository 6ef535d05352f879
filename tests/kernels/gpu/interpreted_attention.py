"""attention_triton.py by Triton's interpreter, on a CPU; test_triton.py starts this file."""

import math
from typing import Any

import numpy as np
import pytest
import torch
import triton.language as tl
from torch.nn import functional
from triton.runtime import interpreter

from rlhf.kernels import kernels_for
from rlhf.kernels.gpu import attention_gpu, attention_triton
from rlhf.kernels.gpu.attention_gpu import LEAST_SIZE, GpuAttention
from tests.rollout.decoder_checks import check_rows_are_extended, tiny_model
from tests.rollout.test_fused_decoder import family

ROUNDING = {torch.bfloat16: 2e-2, torch.float16: 3e-3, torch.float32: 2e-6}
ROWS, COLUMNS = 8, 150
POSITIONS = (0, 1, 31, 32, 33, 64, 65, 149)  # of a row's newest token: around the ends of chunks
CHUNK = 32
SMALL_BLOCK = 2**10  # bytes: several blocks for the longer rows


@pytest.fixture(autouse=True)
def _products_of_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton 3.9 interprets a product of bf16 numbers as one of the integers that store them."""
    create_dot = interpreter.InterpreterBuilder.create_dot

    def exact(operand: Any) -> Any:
        if operand.dtype is not tl.bfloat16:
            return operand
        data = interpreter._convert_float(operand.data, tl.bfloat16, tl.float32, None)
        return interpreter.TensorHandle(data.view(np.float32), tl.float32)

    def dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        return create_dot(self, exact(a), exact(b), *rest)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", dot)


@pytest.mark.parametrize(
    ("dtype", "heads", "kv_heads", "size", "chunk", "columns"),
    [
        (torch.bfloat16, 4, 4, 16, CHUNK, CHUNK),
        (torch.float32, 4, 2, 64, CHUNK, COLUMNS),
        (torch.bfloat16, 8, 1, 80, attention_gpu.CHUNK, COLUMNS),
        (torch.float16, 34, 2, 32, CHUNK, COLUMNS),
        (torch.float32, 1, 1, 24, LEAST_SIZE, LEAST_SIZE),
    ],
)
def test_it_is_attention_over_each_row(
    dtype: torch.dtype, heads: int, kv_heads: int, size: int, chunk: int, columns: int
) -> None:
    """What is behind a row's position is hostile, and stays as it was; so do other rows."""
    generator = torch.Generator().manual_seed(1)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    together = normal(ROWS, heads + 2 * kv_heads, size)  # as one projection gives it
    query, key, value = together.split([heads, kv_heads, kv_heads], dim=1)
    count = -(-COLUMNS // columns)
    memory = normal(2, ROWS * count + 1, kv_heads, columns, size)  # of one page more than rows have
    pages = torch.randperm(ROWS * count, generator=generator).view(ROWS, count)

    def row_of(cache: torch.Tensor, row: int) -> torch.Tensor:
        """Return a copy of the keys and values of a row."""
        return cache[:, pages[row]].transpose(1, 2).flatten(2, 3)

    for row, position in enumerate(POSITIONS):
        behind = row_of(memory, row)
        behind[:, :, position:] = torch.nan
        memory[:, pages[row]] = behind.unflatten(2, (count, columns)).transpose(1, 2)
    before, positions = memory.clone(), torch.tensor(POSITIONS)
    block_bytes = SMALL_BLOCK if chunk < attention_gpu.CHUNK else attention_gpu.BLOCK_BYTES
    attend = GpuAttention(attention_triton, programs=1, chunk=chunk, block_bytes=block_bytes)
    found = attend(query, key, value, memory, pages, positions, COLUMNS)
    for row, position in enumerate(POSITIONS):
        page, place = pages[row, position // columns], position % columns
        before[:, page, :, place] = torch.stack([key[row], value[row]])
        keys, values = row_of(before, row)[:, :, : position + 1].double()
        expected = functional.scaled_dot_product_attention(
            query[row, :, None].double(), keys, values, enable_gqa=True
        )
        error = (found[row].double() - expected[:, 0]).abs().max()
        assert error < ROUNDING[dtype] * values.abs().max(), position
    assert torch.equal(memory.nan_to_num(9), before.nan_to_num(9))


def test_programs_and_neighbours_change_no_bit_of_a_row() -> None:
    generator = torch.Generator().manual_seed(1)
    query = torch.randn(3, 4, 16, generator=generator)
    newest = torch.randn(2, 3, 2, 16, generator=generator)
    memory = torch.randn(2, 30, 2, LEAST_SIZE, 16, generator=generator)
    pages, positions = torch.arange(30).view(3, 10), torch.tensor([149, 70, 20])
    elsewhere, longer = memory.flip(1), 29 - torch.cat([pages, pages], dim=1)
    expected = None
    for programs in (1, 1000):
        attend = GpuAttention(
            attention_triton, programs=programs, chunk=LEAST_SIZE, block_bytes=SMALL_BLOCK
        )
        together = attend(query, *newest, memory, pages, positions, COLUMNS)
        assert expected is None or torch.equal(together, expected)
        expected = together
        for row in range(3):
            one = slice(row, row + 1)
            heads = (query[one], *newest[:, one])
            alone = attend(*heads, elsewhere, longer[one], positions[one], 2 * COLUMNS)
            assert torch.equal(alone[0], expected[row])


def test_a_row_past_the_columns_writes_no_results_of_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It has ended, and its result is of no use."""
    results = []

    def with_room_behind(like: torch.Tensor, *shape: Any, **how: Any) -> torch.Tensor:
        shape = shape if isinstance(shape[0], int) else shape[0]
        results.append(torch.zeros(math.prod(shape) + 9, dtype=how.get("dtype", like.dtype)))
        return results[-1][:-9].view(shape)

    monkeypatch.setattr(torch.Tensor, "new_empty", with_room_behind)
    query, memory, pages = torch.ones(1, 1, 16), torch.ones(2, 3, 1, CHUNK, 16), torch.arange(3)
    attend = GpuAttention(attention_triton, programs=64, chunk=CHUNK, block_bytes=SMALL_BLOCK)
    attend(query, query, query, memory, pages[None], torch.tensor([2 * CHUNK]), CHUNK)
    assert not any(result[-9:].any() for result in results)


def test_decoders_compute_what_their_models_do(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    class Counted(GpuAttention):
        def __call__(self, *arguments: Any) -> torch.Tensor:
            calls.append(arguments)
            return super().__call__(*arguments)

    kernel = Counted(attention_triton, programs=64, chunk=LEAST_SIZE, block_bytes=SMALL_BLOCK)
    monkeypatch.setattr(kernels_for("cpu"), "attention_kernel", lambda *_, **__: kernel)
    check_rows_are_extended(tiny_model("qwen3"), family)
    assert calls
