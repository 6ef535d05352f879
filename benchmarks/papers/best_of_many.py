"""Gold of the best of n answers by a reward model, from SFT answers to held-out prompts.

Shapes: P = prompts, N = answers to each.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from best_of import kl_bound
from judge_run import Answer, Policy
from run_prompts import RunPrompts
from torch import Tensor

from papers.claims import Place
from rlhf.evaluate.figures import expected_best_of_n

Score = Callable[[Sequence[list[int]]], Sequence[float]]
"""From rows of token ids, prompt and answer, to scores."""


class Drawn(NamedTuple):
    """Answers, and what the judge gives them."""

    answers: list[Answer]
    gold_PN: Tensor


def draw(run_dir: Path, place: Place, *, prompts: int, each: int, seed: int) -> Drawn:
    """Sample ``each`` answers of the run's SFT model to its first held-out prompts."""
    if place.is_quick:
        prompts, each = 4, 64
    torch.manual_seed(seed)
    asked = RunPrompts.of(run_dir).held_out[:prompts]
    policy = Policy.of(run_dir / "sft" / "model")
    answers = policy.answers([prompt for prompt in asked for _ in range(each)], sample=True)
    gold = torch.tensor([answer.rating.gold for answer in answers], dtype=torch.float64)
    return Drawn(answers, gold.view(len(asked), each))


def scored(drawn: Drawn, score: Score) -> Tensor:
    """Return the scores (P, N) of the answers."""
    scores = score([answer.ids for answer in drawn.answers])
    return torch.tensor(scores, dtype=torch.float64).view_as(drawn.gold_PN)


def gold_of_best(score_PN: Tensor, gold_PN: Tensor, n: int) -> float:
    """Return the mean gold score of the best of ``n`` by score, over all choices of n of the N."""
    ranked_PN = gold_PN.gather(1, score_PN.argsort(dim=1))
    return statistics.fmean(expected_best_of_n(golds, n) for golds in ranked_PN.tolist())


def distance_of_best(n: int) -> float:
    """Return Gao et al.'s d for best of n: the square root of log n - (n - 1) / n."""
    return math.sqrt(kl_bound(n))
