"""The tolerance allows every order of summation, and no computation in a shorter type."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rlhf.models.build import build_actor
from tests.models_on_disk import disturb, small_tokenizer, some_ids, source_of
from tests.rounding import assert_near, terms_of


def one_by_one(products: Tensor) -> Tensor:
    """The sum in the order of the terms, rounded after each."""
    return products.cumsum(0)[-1]


def in_blocks(products: Tensor, width: int) -> Tensor:
    """The sum of the sums of every ``width``-th term, as a register of that width sums."""
    padded = torch.nn.functional.pad(products, (0, -len(products) % width))
    return one_by_one(padded.view(-1, width).sum(0))


@settings(deadline=None)
@given(
    st.integers(1, 12),
    st.sampled_from([1e-4, 1.0, 1e4]),
    st.sampled_from([torch.float32, torch.float64]),
    st.integers(0, 10_000),
)
def test_every_order_of_summation_is_allowed(
    power: int, scale: float, dtype: torch.dtype, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    x, y = (torch.randn(2**power, 64, generator=generator, dtype=dtype) for _ in range(2))
    exact = (x.double() * y.double() * scale).sum(0)
    ways = [
        torch.stack([sum_(p) for p in (x * y * scale).T])
        for sum_ in (
            one_by_one,
            lambda p: one_by_one(p.flip(0)),
            lambda p: in_blocks(p, 8),
            lambda p: in_blocks(p, 16),
            torch.sum,
        )
    ]
    for way in ways:
        assert_near(way, exact.to(dtype), terms=2**power)
        assert_near(way, ways[0], terms=2**power)


def test_one_changed_bit_of_bf16_in_one_weight_is_not_allowed() -> None:
    model, ids = build_actor(source_of("llama"), small_tokenizer(), seed=1).eval(), some_ids()
    disturb(model)
    with torch.no_grad():
        logits = model(ids).logits
        model.lm_head.weight[5] *= 1 + 2**-8
        with pytest.raises(AssertionError):
            assert_near(model(ids).logits, logits, terms=terms_of(model, 7))
