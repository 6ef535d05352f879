"""Metrics stored as sums or maxima, so that they merge exactly over micro-batches and ranks."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any, Self

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Mean:
    """A mean stored as (total, count), so that it merges exactly over micro-batches and ranks."""

    total: Tensor
    count: Tensor

    @classmethod
    def of(cls, values: Tensor, keep: Tensor | None = None) -> Self:
        """Return the mean of ``values`` where ``keep`` is True (None: everywhere)."""
        kept, count = _mask_values(values, keep)
        return cls(kept.sum(), count)

    def __add__(self, other: Mean) -> Mean:
        return Mean(self.total + other.total, self.count + other.count)

    def value(self) -> float:
        """Return the mean as a number; 0 if nothing was counted."""
        return (self.total / self.count.clamp(min=1)).item()


@dataclass(frozen=True, slots=True)
class Moments:
    """The first two moments stored as sums, so that means and deviations merge exactly."""

    total: Tensor
    square_total: Tensor
    count: Tensor

    @classmethod
    def of(cls, values: Tensor, keep: Tensor | None = None) -> Self:
        """Return the moments of ``values`` where ``keep`` is True (None: everywhere)."""
        kept, count = _mask_values(values, keep)
        return cls(kept.sum(), kept.square().sum(), count)

    def __add__(self, other: Self) -> Self:
        return type(self)(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    @property
    def mean(self) -> Tensor:
        """Return the mean, a scalar tensor; 0 if nothing was counted."""
        return self.total / self.count.clamp(min=1)

    @property
    def mean_square(self) -> Tensor:
        """Return the mean of the squares, a scalar tensor; 0 if nothing was counted."""
        return self.square_total / self.count.clamp(min=1)

    @property
    def variance(self) -> Tensor:
        """Return the population variance, a scalar tensor."""
        return (self.mean_square - self.mean.square()).clamp(min=0)

    def value(self) -> float:
        """Return the mean as a number."""
        return self.mean.item()

    def std(self) -> float:
        """Return the population standard deviation as a number."""
        return self.variance.sqrt().item()


@dataclass(frozen=True, slots=True)
class Maximum:
    """The largest of some values, which merges exactly over micro-batches and ranks."""

    largest: Tensor

    @classmethod
    def of(cls, values: Tensor, keep: Tensor) -> Self:
        """Return the largest of ``values`` where ``keep`` is True; -inf if nothing is kept."""
        return cls(values.detach().double().masked_fill(~keep, -torch.inf).max())

    def __add__(self, other: Self) -> Self:
        return type(self)(torch.maximum(self.largest, other.largest))

    def value(self) -> float:
        """Return the maximum as a number; 0 if nothing was kept."""
        largest = self.largest.item()
        return 0.0 if largest == -math.inf else largest


@dataclass(frozen=True, slots=True)
class Minimum(Maximum):
    """The smallest of the values, stored as the largest of the negated values."""

    @classmethod
    def of(cls, values: Tensor, keep: Tensor) -> Self:
        """Return the smallest of ``values`` where ``keep`` is True; inf if nothing is kept."""
        return cls(Maximum.of(-values, keep).largest)

    def value(self) -> float:
        """Return the minimum as a number; 0 if nothing was kept."""
        return -Maximum.value(self)


def _mask_values(values: Tensor, keep: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return detached fp64 values, 0 where ``keep`` is False, and the number of kept values."""
    keep = torch.ones_like(values, dtype=torch.bool) if keep is None else keep
    return values.detach().double().masked_fill(~keep, 0.0), keep.sum().double()


Metric = Mean | Moments | Maximum
Metrics = dict[str, Metric]


def merge_metrics(first: Metrics, second: Metrics) -> Metrics:
    """Return the merged metrics of two parts of a batch (equal names); ``first`` may be empty."""
    if not first:
        return second
    return {name: first[name] + second[name] for name in first}  # type: ignore[operator]


def accumulate_metrics(first: Metrics, second: Metrics) -> Metrics:
    """Return the merged metrics of two parts of a step; metrics of only one part are kept."""
    both = first.keys() & second.keys()
    return first | second | {name: first[name] + second[name] for name in both}  # type: ignore[operator]


def loss_metrics(phase: str, loss: Any) -> Metrics:
    """Return the fields of the named tuple ``loss`` as metrics, each called PHASE/FIELD.

    ``mean_loss`` is called PHASE/loss. The tensor ``loss``, which gives the gradients, is skipped.
    """
    metrics = {f"{phase}/{name}": value for name, value in loss._asdict().items() if name != "loss"}
    mean = metrics.pop(f"{phase}/mean_loss", None)
    return metrics if mean is None else {f"{phase}/loss": mean} | metrics


def perplexity(loss: float) -> float:
    """Return exp(``loss``), with ``loss`` in nats per token; infinite if the result overflows."""
    try:
        return math.exp(loss)
    except OverflowError:  # the loss of a diverged model
        return math.inf
