"""The steps of compiled forward passes against torch in fp32, on every instruction set."""

from itertools import pairwise

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from rlhf.base.cpu import Isa
from rlhf.kernels.cpu.decode import (
    Combine,
    CompiledActivation,
    DecodeProgram,
    HeadsAt,
    Linear,
    Norm,
    load_decode_library,
)
from rlhf.rollout.decoders.projections import ACTIVATIONS
from tests.rounding import tolerance


@pytest.fixture(params=[torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
def dtype(request: pytest.FixtureRequest, compiled_isa: Isa) -> torch.dtype:
    if load_decode_library(request.param) is None:
        pytest.skip(f"there is no gcc for {compiled_isa.name}")
    return request.param


def program(dtype: torch.dtype) -> DecodeProgram:
    return DecodeProgram(load_decode_library(dtype), dtype)


def numbers(*shape: int, seed: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def close(found: Tensor, expected: Tensor, *, terms: int) -> None:
    """Equal up to sums of ``terms`` terms in fp32 and the rounding of the stored numbers."""
    stored = tolerance(expected, terms=2, dtype=found.dtype)
    allowed = tolerance(expected, terms=terms, dtype=torch.float32) + stored
    torch.testing.assert_close(found.float(), expected.float(), atol=allowed, rtol=0)


def run(steps: DecodeProgram, given: dict[int, Tensor], rows: int) -> None:
    steps.run(given, torch.arange(rows), torch.arange(rows))


def apply(layer: Linear, x: Tensor, **options: object) -> Tensor:
    """What a linear layer writes, given its inputs and what else it combines with."""
    steps = program(x.dtype)
    source = steps.add_buffer(x.shape[1])
    target = steps.add_buffer(len(layer.weight_OI))
    other = options.pop("other", None)
    y = x.new_empty(len(x), len(layer.weight_OI)) if other is None else other.clone()  # type: ignore[attr-defined]
    steps.add_linear(layer, x=source, y=target, other=target, **options)  # type: ignore[arg-type]
    run(steps, {source: x, target: y}, len(x))
    return y


@pytest.mark.parametrize("rows", [1, 7, 16, 33, 79])
@pytest.mark.parametrize(("outputs", "inputs"), [(64, 32), (100, 96), (7, 64), (33, 18)])
def test_a_linear_layer(dtype: torch.dtype, rows: int, outputs: int, inputs: int) -> None:
    weight = numbers(outputs, inputs, seed=1, dtype=dtype) / 8
    bias, x = numbers(outputs, seed=2, dtype=dtype), numbers(rows, inputs, seed=3, dtype=dtype)
    other, layer = numbers(rows, outputs, seed=4, dtype=dtype), Linear(weight, bias)
    expected = functional.linear(x.float(), weight.float(), bias.float())
    close(apply(layer, x), expected, terms=inputs + 1)
    added = apply(layer, x, combine=Combine.plus, other=other)
    close(added, expected + other.float(), terms=inputs + 2)
    multiplied = apply(layer, x, combine=Combine.times, other=other)
    close(multiplied, expected * other.float(), terms=inputs + 2)
    close(apply(Linear(weight, None), x), x.float() @ weight.float().T, terms=inputs)


def test_layers_one_after_the_other(dtype: torch.dtype) -> None:
    """Each reads what all threads wrote before, and the weights that were prefetched for it."""
    sizes = [64, 256, 32, 130, 48]
    weights = [numbers(o, i, seed=o, dtype=dtype) / 8 for i, o in pairwise(sizes)]
    steps, x = program(dtype), numbers(21, 64, seed=1, dtype=dtype)
    buffers = [steps.add_buffer(size) for size in sizes]
    for weight, (source, target) in zip(weights, pairwise(buffers), strict=True):
        steps.add_linear(Linear(weight, None), x=source, y=target)
    y, expected = x.new_empty(21, 48), x
    for weight in weights:
        expected = (expected.float() @ weight.float().T).to(dtype)
    for _ in range(3):
        run(steps, {buffers[0]: x, buffers[-1]: y}, 21)
        torch.testing.assert_close(y.float(), expected.float(), atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("name", [name for name in ACTIVATIONS if name])
def test_activations(dtype: torch.dtype, name: str) -> None:
    """The identity as weights, so that the activation is all that is computed."""
    x = torch.linspace(-12, 12, 32 * 64).reshape(64, 32).to(dtype)
    activation = ACTIVATIONS[name]
    found = apply(Linear(torch.eye(32).to(dtype), None), x, activation=activation.compiled)
    expected = activation.function(x.float())
    relative = 4e-3 if dtype is torch.bfloat16 else 1e-6
    torch.testing.assert_close(found.float(), expected, atol=2e-6, rtol=relative)
    assert CompiledActivation.none == 0


@pytest.mark.parametrize("size", [8, 24, 100, 768])
@pytest.mark.parametrize("is_rms", [True, False])
def test_norms(dtype: torch.dtype, size: int, is_rms: bool) -> None:
    weight, bias = (1 + numbers(size, seed=s, dtype=dtype) / 8 for s in (1, 2))
    x = 3 * numbers(5, size, seed=3, dtype=dtype) + 7
    steps = program(dtype)
    state = steps.add_buffer(size)
    found = x.clone()
    norm = Norm(weight, None if is_rms else bias, 1e-5, is_rms, size)
    steps.add_norm(norm, x=state, y=state)
    run(steps, {state: found}, 5)
    exact, scale = x.float(), weight.float()
    expected = functional.layer_norm(exact, (size,), scale, bias.float(), 1e-5)
    if is_rms:
        expected = functional.rms_norm(exact, (size,), scale, 1e-5)
    close(found, expected, terms=2 * size)


@pytest.mark.parametrize(("size", "turned"), [(64, 64), (40, 40), (32, 8), (16, 16)])
def test_heads_are_normed_and_rotated(dtype: torch.dtype, size: int, turned: int) -> None:
    steps, heads, tokens = program(dtype), 3, 5
    joined = steps.add_buffer(heads * size + 4)
    x = numbers(tokens, heads * size + 4, seed=1, dtype=dtype)
    weight = 1 + numbers(size, seed=2, dtype=dtype) / 8
    cos, sin = numbers(9, turned, seed=3, dtype=dtype), numbers(9, turned, seed=4, dtype=dtype)
    where = HeadsAt(buffer=joined, first=4, token=heads * size + 4, head=size, heads=heads)
    steps.add_rotary(where, Norm(weight, None, 1e-6, True, size), (cos, sin))
    found, positions = x.clone(), torch.tensor([8, 0, 3, 3, 5])
    steps.run({joined: found}, torch.arange(tokens), positions)
    assert torch.equal(found[:, :4], x[:, :4])
    own = functional.rms_norm(
        x[:, 4:].reshape(tokens, heads, size).float(), (size,), weight.float(), 1e-6
    ).to(dtype)
    part, rest = own[..., :turned].float(), own[..., turned:]
    swapped = part.roll(turned // 2, dims=-1)
    turned_part = part * cos[positions, None].float() + swapped * sin[positions, None].float()
    expected = torch.cat([turned_part, rest.float()], dim=-1)
    close(found[:, 4:].view(tokens, heads, size), expected, terms=2 * size)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "size"),
    [(4, 4, 64), (8, 2, 16), (3, 1, 80), (2, 2, 128), (4, 2, 8), (2, 1, 20)],
)
def test_attention(dtype: torch.dtype, heads: int, kv_heads: int, size: int) -> None:
    rows, capacity, positions = 5, 41, torch.tensor([0, 40, 7, 15, 16])
    memory = numbers(2, rows + 1, kv_heads, capacity, size, seed=1, dtype=dtype)
    joined = numbers(rows, (heads + 2 * kv_heads) * size, seed=2, dtype=dtype)
    counts = [heads, kv_heads, kv_heads]
    query, key, value = joined.view(rows, sum(counts), size).split(counts, dim=1)
    expected_kv_cache = memory.clone()
    for row, position in enumerate(positions):
        expected_kv_cache[0, row, :, position] = key[row]
        expected_kv_cache[1, row, :, position] = value[row]

    mixed = attend(memory, joined, counts, rows=torch.arange(rows), positions=positions)

    assert torch.equal(memory, expected_kv_cache)
    for row, position in enumerate(positions):
        keys, values = expected_kv_cache[:, row, :, : position + 1].float()
        expected = functional.scaled_dot_product_attention(
            query[row].float()[:, None],
            keys.repeat_interleave(heads // kv_heads, dim=0),
            values.repeat_interleave(heads // kv_heads, dim=0),
        )
        close(mixed[row].view(heads, size), expected[:, 0], terms=size + 2 * capacity)


def attend(
    memory: Tensor, joined: Tensor, counts: list[int], *, rows: Tensor, positions: Tensor
) -> Tensor:
    steps, size, width = program(joined.dtype), memory.shape[-1], joined.shape[1]
    buffer, mixed = steps.add_buffer(width), steps.add_buffer(counts[0] * size)
    starts = (0, counts[0] * size, (counts[0] + counts[1]) * size)
    query, key, value = (
        HeadsAt(buffer, start, width, size, count)
        for start, count in zip(starts, counts, strict=True)
    )
    steps.add_attention((query, key, value), memory, mixed=mixed)
    out = joined.new_empty(len(joined), counts[0] * size)
    steps.run({buffer: joined, mixed: out}, rows, positions)
    return out


def test_tokens_of_a_prompt_see_each_other(dtype: torch.dtype) -> None:
    """Two prompts beside the newest token of another row: each token as if it came alone."""
    heads, size, rows = 2, 32, torch.tensor([2, 0, 0, 0, 1, 1])
    positions = torch.tensor([9, 0, 1, 2, 0, 1])
    memory = numbers(2, 3, heads, 12, size, seed=1, dtype=dtype)
    joined, counts = numbers(6, 3 * heads * size, seed=2, dtype=dtype), [heads] * 3
    expected_kv_cache, expected = memory.clone(), []
    for token in range(6):
        own = slice(token, token + 1)
        one = joined[own].contiguous()
        each = {"rows": rows[own], "positions": positions[own]}
        expected.append(attend(expected_kv_cache, one, counts, **each))
    mixed = attend(memory, joined, counts, rows=rows, positions=positions)
    assert torch.equal(memory, expected_kv_cache)
    assert torch.equal(mixed, torch.cat(expected))


def test_onednn_keeps_its_own_tiles(dtype: torch.dtype) -> None:
    """Both in turn, in one process: each must find the registers as it left them."""
    x, weight = numbers(64, 64, seed=1, dtype=dtype), numbers(64, 64, seed=2, dtype=dtype) / 8
    expected = x.float() @ weight.float().T
    for _ in range(3):
        close(x @ weight.T, expected, terms=64)
        close(apply(Linear(weight, None), x), expected, terms=64)
