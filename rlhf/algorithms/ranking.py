"""Measure how well scores rank responses. Shapes: N = responses, C = responses of a chunk."""

from __future__ import annotations

from collections import Counter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rlhf.base.intervals import wilson_interval

CHUNK = 1024  # responses that are compared with all others at once


class Ranking(NamedTuple):
    """The share of pairs of responses with different grades that scores put in the right order.

    If grades have only two values, this share is the area under the ROC curve (AUC).
    """

    accuracy: float
    low: float  # 95 % confidence interval
    high: float
    size: int  # number of responses

    def results(self) -> dict[str, Any]:
        """Return the entries of result.json."""
        interval = [self.low, self.high]
        return {"accuracy": self.accuracy, "accuracy_ci": interval, "responses": self.size}


def measure_ranking(scores_N: Tensor, grades_N: Tensor) -> Ranking:
    """Compare all pairs of responses with different grades; equal scores count one half.

    The interval is Wilson's interval for the number of independent comparisons that would have the
    variance that the jackknife estimates. It is [0, 1] if all grades are equal.
    """
    size, scores_N, grades_N = len(scores_N), scores_N.double(), grades_N.double()
    right, compared = [], []
    for start in range(0, size, CHUNK):
        chunk = slice(start, start + CHUNK)
        better_CN = (grades_N[chunk, None] - grades_N).sign()
        agrees_CN = better_CN * (scores_N[chunk, None] - scores_N).sign()
        right.append(((1 + agrees_CN) / 2).masked_fill(better_CN == 0, 0.0).sum(1))
        compared.append((better_CN != 0).double().sum(1))
    right_N, compared_N = torch.cat(right), torch.cat(compared)
    total = compared_N.sum()
    if not total:
        return Ranking(0.5, 0.0, 1.0, size)
    accuracy = float(right_N.sum() / total)
    without_N = (right_N.sum() - 2 * right_N) / (total - 2 * compared_N)  # without response n
    variance = float((size - 1) * without_N.var(correction=0))
    largest = max(Counter(grades_N.tolist()).values())
    num_independent: float = min(size // 2, size - largest)  # comparisons without a common response
    if variance > 0:
        num_independent = accuracy * (1 - accuracy) / variance
    low, high = wilson_interval(accuracy * num_independent, num_independent)
    return Ranking(accuracy, low, high, size)
