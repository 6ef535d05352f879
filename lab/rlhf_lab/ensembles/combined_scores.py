"""Combine the scores of several reward models to one score.

Shapes: M = members of an ensemble, ... = any leading dimensions.
"""

from __future__ import annotations

from torch import Tensor


def combine_scores(scores_M: Tensor, *, combine: str, coef: float) -> Tensor:
    """Combine the scores (..., M) of M members, https://arxiv.org/abs/2310.02743, section 3.

    - mean: the mean over the members.
    - worst: the lowest score (worst-case optimisation).
    - uncertainty: the mean minus ``coef`` times the variance (uncertainty-weighted optimisation).
    """
    match combine:
        case "mean":
            return scores_M.mean(dim=-1)
        case "worst":
            return scores_M.amin(dim=-1)
        case "uncertainty":
            return scores_M.mean(dim=-1) - coef * scores_M.var(dim=-1, correction=0)
        case _:
            raise ValueError(f"no combination of scores is called {combine}")


def disagreement(scores_M: Tensor) -> Tensor:
    """Return the standard deviation (...) of scores (..., M) over the members."""
    return scores_M.std(dim=-1, correction=0)
