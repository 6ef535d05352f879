"""Ragged batches for property tests. Shapes: B = sequences, T = tokens."""

from typing import Any

import torch
from hypothesis import settings
from hypothesis import strategies as st
from torch import Tensor

quick = settings(deadline=None, max_examples=30, derandomize=True, database=None)
seeds = st.integers(0, 10_000)
garbage = st.sampled_from([7e7, float("inf"), float("-inf"), float("nan")])


@st.composite
def keeps(draw: st.DrawFn, min_rows: int = 1) -> Tensor:
    """Keep mask (B, T) of right-padded rows, each of at least one token."""
    lengths = draw(st.lists(st.integers(1, 6), min_size=min_rows, max_size=5))
    return keep_of(lengths, max(lengths) + draw(st.integers(0, 3)))


def keep_of(lengths: list[int], width: int) -> Tensor:
    """Keep mask (B, T) of rows with these numbers of tokens."""
    return torch.arange(width) < torch.tensor(lengths)[:, None]


def normal(*shape: int, seed: int, scale: float = 1.0) -> Tensor:
    """Normal numbers in float64, the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    return scale * torch.randn(*shape, dtype=torch.float64, generator=generator)


def shuffled(size: int, *, seed: int) -> Tensor:
    """A permutation of ``size`` rows."""
    return torch.randperm(size, generator=torch.Generator().manual_seed(seed))


def with_garbage(x_BT: Tensor, keep_BT: Tensor, value: float, *, extra: int = 0) -> Tensor:
    """``x`` with ``value`` in its dead cells and in ``extra`` more columns."""
    more_B1 = torch.full_like(x_BT[:, :1], value)
    return torch.cat([torch.where(keep_BT, x_BT, value), more_B1.expand(-1, extra)], dim=1)


def f64(*values: Any) -> Tensor:
    """A tensor in float64; each argument is a number of a vector, or a row of a matrix."""
    return torch.tensor(values, dtype=torch.float64)


def assert_close(actual: Tensor | float, expected: Any, *, atol: float = 1e-9) -> None:
    """Equal to ``atol``; nan and infinity are equal to nothing but themselves."""
    actual = torch.as_tensor(actual)
    expected = torch.as_tensor(expected, dtype=actual.dtype)
    torch.testing.assert_close(actual, expected, rtol=0, atol=atol)
