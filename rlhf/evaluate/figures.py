"""Compute the statistics of an evaluation from its stored rows, without any model.

Intervals are over prompts: Wilson's for shares, otherwise percentiles of a bootstrap
(https://doi.org/10.1214/aos/1176344552), which has no width if all values are equal.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations
from typing import Any, NamedTuple

import numpy as np
import torch

from rlhf.algorithms.reward import calibration_bins, calibration_error
from rlhf.base.intervals import wilson_interval

DRAWS = 2000  # bootstrap samples
PERCENTILES = (2.5, 97.5)
NEWTON_STEPS = 25
REPEATED_N = 4  # words per n-gram for ``repeated_ngram_share``

StoredRow = Mapping[str, Any]


def answer_statistics(rows: Sequence[StoredRow], judges: Sequence[str] = ()) -> dict[str, Any]:
    """Return means, 95 % intervals, diversity and pass@k of a model's answers with one decoding.

    ``judges`` are names of parts of ``rewards`` with weight 0, which serve as judges of the score.
    """
    by_prompt: defaultdict[str, list[StoredRow]] = defaultdict(list)
    for row in rows:
        by_prompt[row["prompt"]].append(row)
    scores = [float(np.mean([row["score"] for row in group])) for group in by_prompt.values()]
    is_share = all(row["score"] in (0, 1) for row in rows)
    figures: dict[str, Any] = {
        "prompts": len(by_prompt),
        "answers": len(rows),
        "score": _mean(rows, "score"),
        "score_ci": share_interval(scores) if is_share else bootstrap_interval(scores),
        "score_std": float(np.std([row["score"] for row in rows])),
        "kl": _mean(rows, "kl"),
        "tokens": _mean(rows, "tokens"),
        "ended_share": _mean(rows, "ended"),
        "distinct_responses": len({row["response"] for row in rows}) / len(rows),
        "distinct_1": distinct_ngram_ratio(rows, 1),
        "distinct_2": distinct_ngram_ratio(rows, 2),
        "repeated_share": float(np.mean([repeated_ngram_share(row["response"]) for row in rows])),
    }
    score_keys = {key for row in rows for key in row if key.startswith(("gold/", "parts/"))}
    figures |= {key: _mean(rows, key) for key in sorted(score_keys)}
    if all(row["right"] is not None for row in rows):
        right = [[bool(row["right"]) for row in group] for group in by_prompt.values()]
        samples = min(map(len, right))
        figures["pass_at"] = {
            str(k): float(np.mean([estimate_pass_at_k(flags, k) for flags in right]))
            for k in (1, 2, 4, 8, 16, 32)
            if k <= samples
        }
        figures["right_ci"] = share_interval([float(np.mean(flags)) for flags in right])
    if min(map(len, by_prompt.values())) > 1:
        groups = list(by_prompt.values())
        if "gold/gold" in score_keys:
            figures |= best_of_n_statistics(groups, "gold/gold")
        if judges:
            figures["by_judge"] = {
                name: best_of_n_statistics(groups, f"parts/{name}") for name in judges
            }
    return figures


def win_rate(rows: Sequence[StoredRow], model: str, against: str) -> dict[str, Any]:
    """Return statistics of how often ``model`` scores above ``against``; ties count half.

    ``controlled`` is the win rate that a logistic regression of wins on the length difference
    predicts at equal length (https://arxiv.org/abs/2404.04475, with only the term for length).
    """
    ours, theirs = (
        {(row["prompt"], row["sample"]): row for row in rows if row["model"] == name}
        for name in (model, against)
    )
    wins: defaultdict[str, list[float]] = defaultdict(list)
    extra_tokens: defaultdict[str, list[float]] = defaultdict(list)
    for key in ours.keys() & theirs.keys():
        row, rival = ours[key], theirs[key]
        wins[key[0]].append(0.5 + 0.5 * np.sign(row["score"] - rival["score"]))
        extra_tokens[key[0]].append(row["tokens"] - rival["tokens"])
    prompts = sorted(wins)
    rates = [float(np.mean(wins[prompt])) for prompt in prompts]
    length_differences = [float(np.mean(extra_tokens[prompt])) for prompt in prompts]
    return {
        "model": model,
        "against": against,
        "prompts": len(rates),
        "rate": float(np.mean(rates)),
        "ci": share_interval(rates),
        "controlled": win_rate_at_equal_length(rates, length_differences),
    }


def win_rates(rows: Sequence[StoredRow], models: Sequence[str]) -> list[dict[str, Any]]:
    """Return the win rate of every model against every earlier model."""
    return [win_rate(rows, later, earlier) for earlier, later in combinations(models, 2)]


def bootstrap_interval(values: Sequence[float]) -> list[float]:
    """Return the 95 % bootstrap interval of the mean of ``values``, one value per prompt."""
    array = np.asarray(values, dtype=float)
    chosen = np.random.default_rng(0).integers(len(array), size=(DRAWS, len(array)))
    return [float(end) for end in np.percentile(array[chosen].mean(axis=1), PERCENTILES)]


def share_interval(shares: Sequence[float]) -> list[float]:
    """Return Wilson's 95 % interval of the mean of shares (0 to 1), one share per prompt."""
    return list(wilson_interval(sum(shares), len(shares)))


def win_rate_at_equal_length(rates: Sequence[float], differences: Sequence[float]) -> float:
    """Return the win rate that a logistic regression on length differences predicts at 0."""
    spread = float(np.std(differences))
    if spread == 0:
        return float(np.mean(rates))
    x = np.stack([np.ones(len(rates)), np.tanh(np.asarray(differences) / spread)], axis=1)
    y, theta = np.asarray(rates), np.zeros(2)
    for _ in range(NEWTON_STEPS):  # ridge penalty of 1e-2, since outcomes can be separable
        p = 1 / (1 + np.exp(-x @ theta))
        gradient = x.T @ (y - p) - 1e-2 * theta
        curvature = (x * (p * (1 - p))[:, None]).T @ x + 1e-2 * np.eye(2)
        theta = theta + np.linalg.solve(curvature, gradient)
    return float(1 / (1 + math.exp(-theta[0])))


def estimate_pass_at_k(right: Sequence[bool], k: int) -> float:
    """Estimate a prompt's pass@k from flags of right answers (https://arxiv.org/abs/2107.03374)."""
    wrong = len(right) - sum(right)
    return 1 - math.comb(wrong, k) / math.comb(len(right), k)


def best_of_n_statistics(by_prompt: Sequence[Sequence[StoredRow]], gold: str) -> dict[str, Any]:
    """Return two statistics of how well the score chooses among the answers to a prompt.

    ``gold`` is the key of the gold score in the rows. ``best_of`` is by n the mean gold score of
    the answer with the highest score among n, over all choices of n answers. ``agreement`` is the
    share of prompts whose answer with the highest score has the highest gold score.
    """
    ranked = [
        [row[gold] for row in sorted(rows, key=lambda row: row["score"])] for rows in by_prompt
    ]
    return {
        "best_of": {
            str(n): float(np.mean([expected_best_of_n(golds, n) for golds in ranked]))
            for n in (1, 2, 4, 8, 16, 32)
            if n <= min(map(len, ranked))
        },
        "agreement": float(np.mean([golds[-1] == max(golds) for golds in ranked])),
    }


class RankedRow(NamedTuple):
    """The scores of the good and of the bad responses to a prompt."""

    subset: str
    id: str
    good: Sequence[float]
    bad: Sequence[float]

    @property
    def credit(self) -> float:
        """Return the share of good responses among the responses with the highest score."""
        best = max(*self.good, *self.bad)
        return self.good.count(best) / (self.good.count(best) + self.bad.count(best))

    @property
    def gap(self) -> float:
        """Return the lowest score of a good response minus the highest score of a bad one."""
        return min(self.good) - max(self.bad)


def best_of_k_statistics(rows: Sequence[RankedRow]) -> dict[str, dict[str, Any]]:
    """Return by subset how often the best of all responses to a prompt is a good one."""
    subsets: defaultdict[str, list[RankedRow]] = defaultdict(list)
    for row in rows:
        subsets[row.subset].append(row)
    figures: dict[str, dict[str, Any]] = {}
    for name, group in subsets.items():
        credits = [row.credit for row in group]
        figures[name] = {
            "prompts": len(group),
            "responses": float(np.mean([len(row.good) + len(row.bad) for row in group])),
            "chance": float(np.mean([len(r.good) / (len(r.good) + len(r.bad)) for r in group])),
            "accuracy": float(np.mean(credits)),
            "accuracy_ci": share_interval(credits),
        }
        if any(row.id.startswith("tied:") for row in group):
            figures[name]["ties_score"] = ties_score(group)
    return figures


def ties_score(rows: Sequence[RankedRow]) -> float:
    """Return the score of RewardBench 2's subset Ties (https://arxiv.org/abs/2506.01937, 3.2).

    A prompt with many good responses has the id tied:N, a similar prompt with one has ref:N. All
    good responses should score above the bad ones, with smaller gaps among them than to the bad.
    """
    tied, ref = (
        {row.id.partition(":")[2]: row for row in rows if row.id.startswith(prefix)}
        for prefix in ("tied:", "ref:")
    )
    accuracies = [np.mean([r.gap > 0 for r in by_id.values()]) for by_id in (tied, ref) if by_id]
    both = sorted(tied.keys() & ref.keys())
    spread = np.array([max(tied[key].good) - min(tied[key].good) for key in both])
    gap = np.array([tied[key].gap for key in both])
    hard = np.minimum(gap, [ref[key].gap for key in both])
    with np.errstate(divide="ignore", invalid="ignore"):
        margin = np.nan_to_num(np.tanh(hard / spread - 1))
    terms = zip((0.2, 0.2, 0.01), (gap > spread, hard > spread, margin), strict=True)
    margins = sum(weight * np.mean(term) for weight, term in terms) if both else 0.0
    return float(0.3 * sum(accuracies) + margins)


def expected_best_of_n(ranked: Sequence[float], n: int) -> float:
    """Return the mean value of the best of n items, over all choices of n; the best is ranked last.

    An item with i items before it is the best in C(i, n - 1) of the C(N, n) choices. This is the
    unbiased estimator of Gao et al. (https://arxiv.org/abs/2210.10760, appendix).
    """
    weighted = (math.comb(below, n - 1) * value for below, value in enumerate(ranked))
    return sum(weighted) / math.comb(len(ranked), n)


def distinct_ngram_ratio(rows: Iterable[StoredRow], n: int) -> float:
    """Return the ratio of distinct to all word n-grams (https://arxiv.org/abs/1510.03055)."""
    grams = Counter(gram for row in rows for gram in _ngrams(row["response"], n))
    return len(grams) / grams.total() if grams else 0.0


def repeated_ngram_share(text: str) -> float:
    """Return the share of a text's ``REPEATED_N``-grams of words that occur earlier in the text."""
    grams = _ngrams(text, REPEATED_N)
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


def reward_model_statistics(margins: Sequence[float], *, bins: int = 10) -> dict[str, Any]:
    """Return the accuracy and the calibration of a reward model on preference pairs.

    ``margins`` are chosen minus rejected scores. The model's certainty about a pair is
    sigmoid(|margin|). ``calibration`` lists mean certainty and accuracy for bins of equally many
    pairs, for a chart; ``calibration_error`` uses bins of equal width, as in the reward phase.
    """
    array = np.asarray(margins, dtype=float)
    right, certainty = (array > 0).astype(float), 1 / (1 + np.exp(-np.abs(array)))
    groups = np.array_split(np.argsort(certainty), min(bins, len(array)))
    calibration = [
        {
            "certainty": float(certainty[group].mean()),
            "right": float(right[group].mean()),
            "pairs": len(group),
        }
        for group in groups
    ]
    every_B = torch.ones(len(array), dtype=torch.bool)
    error = calibration_error(calibration_bins(torch.from_numpy(array), every_B))
    return {
        "pairs": len(array),
        "accuracy": float(right.mean()),
        "accuracy_ci": share_interval(right.tolist()),
        "calibration": calibration,
        "calibration_error": error,
    }


def _mean(rows: Sequence[StoredRow], key: str) -> float:
    return float(np.mean([float(row[key]) for row in rows]))


def _ngrams(text: str, n: int) -> list[tuple[str, ...]]:
    words = text.split()
    return [tuple(words[start : start + n]) for start in range(len(words) - n + 1)]
