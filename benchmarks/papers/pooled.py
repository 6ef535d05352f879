"""Figures of all seeds together. Python's min and max lose a NaN; those of tensors keep it."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from papers.claims import Figures


def pooled(found: Mapping[int, Figures], name: str) -> Tensor:
    """Return a figure of all seeds in fp64, the numbers of a seed in a row (seeds, numbers)."""
    return torch.tensor([each[name] for each in found.values()], dtype=torch.float64)
