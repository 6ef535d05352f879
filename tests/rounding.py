"""How far two right computations of the same numbers may lie apart: no machine's printout.

CPUs sum in different orders: in blocks of their registers' width, with or without fused
multiply-adds, on one thread or several. In a type with unit roundoff u, a sum of n products lies
within λ √n u Σ|xᵢyᵢ| of the exact sum in any order, but for a probability that vanishes as λ grows
(Higham and Mary, A New Approach to Probabilistic Rounding Error Analysis, 2019, theorem 2.4). Where
signs are random, Σ|xᵢyᵢ| is about √n times the sum. So the error is about n u times the size of the
result, and two computations lie within twice that. The errors of a chain of layers add up: n counts
the terms of all sums on the way to the result.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn


def tolerance(*expected: Tensor, terms: int, dtype: torch.dtype | None = None) -> float:
    """The difference that rounding explains, for values as large as the largest of ``expected``.

    ``terms`` is the number of terms of all sums on the way; ``dtype`` is that of the computation,
    by default that of the values.
    """
    size = max(float(each.detach().abs().max()) for each in expected if each.numel())
    unit = torch.finfo(dtype or expected[0].dtype).eps / 2
    return 2 * terms * unit * size


def terms_of(model: nn.Module, tokens: int) -> int:
    """The terms of all sums from the ids of ``tokens`` tokens to one logit of ``model``.

    Each row of a weight is one sum, and each attention sums over the tokens twice; those of
    one layer side by side are counted one after the other, an upper bound.
    """
    weights = [p for p in model.parameters() if p.ndim > 1]
    return sum(weight.shape[-1] for weight in weights) + 2 * tokens * len(weights)


def assert_near(
    got: Tensor | Sequence[Tensor],
    expected: Tensor | Sequence[Tensor],
    *,
    terms: int,
    dtype: torch.dtype | None = None,
) -> None:
    """Check that two computations differ by rounding only.

    Tensors of one sequence, such as the gradients of a loss, are judged by the largest of them:
    small ones are differences of large numbers.
    """
    ours, theirs = ([x] if isinstance(x, Tensor) else list(x) for x in (got, expected))
    allowed = tolerance(*theirs, terms=terms, dtype=dtype)
    torch.testing.assert_close(ours, theirs, atol=allowed, rtol=0)
