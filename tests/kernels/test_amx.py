"""The kernels for AMX against the same in fp32."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from rlhf.kernels import amx
from rlhf.rollout.decoders.projections import ACTIVATIONS

pytestmark = pytest.mark.skipif(
    amx.kernels() is None,
    reason="no AMX, or no C compiler; test_levels.py and test_family_decoder.py test what is used",
)
HALF = {"atol": 1e-2, "rtol": 1e-2}  # bf16 keeps 8 bits


def half(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


@pytest.mark.parametrize("rows", [1, 15, 16, 32, 33, 79])
@pytest.mark.parametrize(("outputs", "inputs"), [(64, 32), (100, 96), (7, 64), (330, 64)])
def test_a_linear_layer(rows: int, outputs: int, inputs: int) -> None:
    weight, bias = half(outputs, inputs, seed=1) / 8, half(outputs, seed=2)
    x, other = half(rows, inputs, seed=3), half(rows, outputs, seed=4)
    layer = amx.AmxProjection(weight, bias, "none")
    expected = functional.linear(x.float(), weight.float(), bias.float())
    torch.testing.assert_close(layer(x).float(), expected, **HALF)
    torch.testing.assert_close(layer.plus(x, other).float(), expected + other.float(), **HALF)
    torch.testing.assert_close(layer.times(x, other).float(), expected * other.float(), **HALF)
    alone = amx.AmxProjection(weight, None, "none")(x)
    torch.testing.assert_close(alone.float(), expected - bias.float(), atol=2e-2, rtol=1e-2)


def test_leading_dimensions_and_strides_are_kept() -> None:
    weight, x = half(64, 32, seed=1), half(3, 5, 64, seed=2)[..., ::2]
    result = amx.AmxProjection(weight, None, "none")(x)
    assert result.shape == (3, 5, 64)
    expected = x.float() @ weight.float().T
    torch.testing.assert_close(result.float(), expected, atol=0.1, rtol=1e-2)


@pytest.mark.parametrize("name", [name for name in ACTIVATIONS if name])
def test_activations(name: str) -> None:
    """The identity as weights, so that the activation is all that is computed."""
    activation = ACTIVATIONS[name]
    x = torch.linspace(-12, 12, 32 * 64).reshape(64, 32).bfloat16()
    layer = amx.AmxProjection(torch.eye(32).bfloat16(), None, activation.amx)
    expected = activation.function(x.float())
    torch.testing.assert_close(layer(x).float(), expected, atol=1e-4, rtol=4e-3)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "size"), [(4, 4, 64), (8, 2, 16), (3, 1, 80), (2, 2, 128)]
)
def test_attention(heads: int, kv_heads: int, size: int) -> None:
    rows, capacity, positions = 5, 41, torch.tensor([0, 40, 7, 15, 16])
    memory = half(2, rows + 1, kv_heads, capacity, size, seed=1)
    joined = half(rows, heads + 2 * kv_heads, size, seed=2)
    query, key, value = joined.split([heads, kv_heads, kv_heads], dim=1)
    expected_memory = memory.clone()
    for row, position in enumerate(positions):
        expected_memory[0, row, :, position] = key[row]
        expected_memory[1, row, :, position] = value[row]

    own = torch.arange(rows)
    mixed = amx.attend(memory, (query, key, value), rows_T=own, positions_T=positions)

    assert torch.equal(memory, expected_memory)
    for row, position in enumerate(positions):
        keys, values = expected_memory[:, row, :, : position + 1].float()
        expected = functional.scaled_dot_product_attention(
            query[row].float()[:, None],
            keys.repeat_interleave(heads // kv_heads, dim=0),
            values.repeat_interleave(heads // kv_heads, dim=0),
        )
        torch.testing.assert_close(mixed[row].float(), expected[:, 0], **HALF)


def test_tokens_of_a_prompt_see_each_other() -> None:
    """Two prompts beside the newest token of another row: each token as if it came alone."""
    heads, size, rows_T = 2, 32, torch.tensor([2, 0, 0, 0, 1, 1])
    positions_T = torch.tensor([9, 0, 1, 2, 0, 1])
    memory = half(2, 3, heads, 12, size, seed=1)
    query, key, value = half(6, 3 * heads, size, seed=2).split(heads, dim=1)
    expected_memory, expected = memory.clone(), []
    for token in range(6):
        own = {"rows_T": rows_T[token, None], "positions_T": positions_T[token, None]}
        one = [x[token, None] for x in (query, key, value)]
        expected.append(amx.attend(expected_memory, one, **own))
    mixed = amx.attend(memory, (query, key, value), rows_T=rows_T, positions_T=positions_T)
    assert torch.equal(memory, expected_memory)
    assert torch.equal(mixed, torch.cat(expected))


def test_onednn_keeps_its_own_tiles() -> None:
    """Both in turn, in one process: each must find the registers as it left them."""
    x, weight = half(64, 64, seed=1), half(64, 64, seed=2)
    layer, expected = amx.AmxProjection(weight, None, "none"), x.float() @ weight.float().T
    for _ in range(3):
        torch.testing.assert_close((x @ weight.T).float(), expected, atol=0.3, rtol=1e-2)
        torch.testing.assert_close(layer(x).float(), expected, atol=0.3, rtol=1e-2)
