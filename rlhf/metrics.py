"""Metrics as sums, which merge exactly over micro-batches and ranks; numbers when printed."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Self

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Mean:
    """A mean kept as (total, count), so that it merges exactly across micro-batches and ranks."""

    total: Tensor
    count: Tensor

    @classmethod
    def of(cls, values: Tensor, keep: Tensor | None = None) -> Self:
        """Mean of ``values`` where ``keep`` is True (everywhere without it)."""
        kept, count = _kept(values, keep)
        return cls(kept.sum(), count)

    def __add__(self, other: Mean) -> Mean:
        return Mean(self.total + other.total, self.count + other.count)

    def value(self) -> float:
        """The mean; 0 when nothing was counted."""
        return (self.total / self.count.clamp(min=1)).item()


@dataclass(frozen=True, slots=True)
class Moments:
    """First two moments kept as sums, so that means and deviations merge exactly."""

    total: Tensor
    square_total: Tensor
    count: Tensor

    @classmethod
    def of(cls, values: Tensor, keep: Tensor | None = None) -> Self:
        """Moments of ``values`` where ``keep`` is True (everywhere without it)."""
        kept, count = _kept(values, keep)
        return cls(kept.sum(), kept.square().sum(), count)

    def __add__(self, other: Moments) -> Moments:
        return Moments(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    @property
    def mean(self) -> Tensor:
        """Mean, a scalar tensor; 0 when nothing was counted."""
        return self.total / self.count.clamp(min=1)

    @property
    def mean_square(self) -> Tensor:
        """Mean of the squares, a scalar tensor; 0 when nothing was counted."""
        return self.square_total / self.count.clamp(min=1)

    @property
    def variance(self) -> Tensor:
        """Population variance, a scalar tensor."""
        return (self.mean_square - self.mean.square()).clamp(min=0)

    def value(self) -> float:
        """The mean as a number."""
        return self.mean.item()

    def std(self) -> float:
        """The standard deviation as a number."""
        return self.variance.sqrt().item()


@dataclass(frozen=True, slots=True)
class Maximum:
    """The largest value seen."""

    largest: Tensor

    @classmethod
    def of(cls, values: Tensor, keep: Tensor) -> Self:
        """Largest of ``values`` where ``keep`` is True; minus infinity when nothing is kept."""
        return cls(values.detach().double().masked_fill(~keep, -torch.inf).max())

    def __add__(self, other: Self) -> Self:
        return type(self)(torch.maximum(self.largest, other.largest))

    def value(self) -> float:
        """The maximum as a number."""
        return self.largest.item()


@dataclass(frozen=True, slots=True)
class Minimum(Maximum):
    """The smallest value seen, kept as the largest of the negated values."""

    @classmethod
    def of(cls, values: Tensor, keep: Tensor) -> Self:
        """Smallest of ``values`` where ``keep`` is True; infinity when nothing is kept."""
        return cls(Maximum.of(-values, keep).largest)

    def value(self) -> float:
        """The minimum as a number."""
        return -self.largest.item()


def _kept(values: Tensor, keep: Tensor | None) -> tuple[Tensor, Tensor]:
    """Values in fp64, 0 where ``keep`` is False, and how many are kept; out of the graph."""
    keep = torch.ones_like(values, dtype=torch.bool) if keep is None else keep
    return values.detach().double().masked_fill(~keep, 0.0), keep.sum().double()


Metric = Mean | Moments | Maximum
Metrics = dict[str, Metric]


def merge_metrics(first: Metrics, second: Metrics) -> Metrics:
    """Metrics of two parts of one batch; both parts must carry the same names."""
    if not first:
        return second
    return {name: first[name] + second[name] for name in first}  # type: ignore[operator]
