"""KL and win rate of best of n, exact: every answer of a small task is enumerated.

Shapes: A = answers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from best_of import choose_best, estimate_kl_of_best, kl_bound
from torch import Tensor

from papers.claims import Figures, Outcome, PaperResult, Place, Verdict
from papers.pooled import pooled
from rlhf.rollout.sampling import SamplingSettings, draw_tokens
from rlhf_lab.gradients.enumerated import (
    LETTERS,
    MAX_TOKENS,
    AnswerTable,
    answer_logprobs,
    draw_logits,
    enumerate_answers,
)

POLICIES = 20  # random policies and rewards for one seed
SCALES = (0.5, 1.0, 2.0, 3.0)  # of the logits: from flat policies to those that repeat themselves
SIZES = (2, 4, 8, 16, 64)
LEVELS = 4  # of tied rewards
PIECES = 2000  # into which each answer is divided, to see the bounds reached
ROUNDING = 1e-12
REACHED = 1e-3  # a bound that is missed by less is reached
DRAWS = 20_000  # groups of answers for one comparison of the sampler
SAMPLED_SIZES = (2, 8)
STANDARD_ERRORS = 3
FEWEST = 5.0  # answers that are expected less often share one cell of the chi-square
SAMPLING = SamplingSettings(max_tokens=MAX_TOKENS, temperature=1.0, top_k=0, top_p=1.0)


class BestOf(NamedTuple):
    """The distribution of the best of n answers."""

    policy_A: Tensor  # probabilities of the answers under the policy that draws
    best_A: Tensor  # and of being the chosen one
    below_A: Tensor  # probability that the policy draws an answer of a lower reward
    level_A: Tensor  # probability that it draws one of the same reward
    n: int

    @classmethod
    def of(cls, policy_A: Tensor, rewards_A: Tensor, n: int) -> BestOf:
        """Return the distribution if one of the answers with the best reward is chosen."""
        levels, level_of_A = rewards_A.unique(return_inverse=True)
        mass_L = policy_A.new_zeros(len(levels)).index_add(0, level_of_A, policy_A)
        upto_L = (mass_L.cumsum(0) / mass_L.sum()).clamp(max=1.0)
        below_L = torch.cat([upto_L.new_zeros(1), upto_L[:-1]])
        chosen_L = upto_L**n - below_L**n
        best_A = (chosen_L / mass_L)[level_of_A] * policy_A
        return cls(policy_A, best_A, below_L[level_of_A], mass_L[level_of_A], n)

    @property
    def kl(self) -> float:
        """KL(best of n || policy), in nats."""
        return float(torch.special.xlogy(self.best_A, self.best_A / self.policy_A).sum())

    @property
    def estimated_kl(self) -> float:
        """The mean of the paper's estimator over chosen answers."""
        each = [estimate_kl_of_best(float(p), self.n) for p in self.policy_A]
        return float(self.best_A @ torch.tensor(each, dtype=torch.float64))

    @property
    def win_rate(self) -> float:
        """How often the chosen answer is better than one of the policy; ties count half."""
        return float(self.best_A @ (self.below_A + self.level_A / 2))


def compare(policy_A: Tensor, rewards_A: Tensor) -> dict[str, float]:
    """Return what is left between KL, win rate, estimator and their bounds, the least over all n.

    The answers have different rewards, or only ``LEVELS`` different ones. For ``missed`` each
    answer is divided into pieces of different rewards, as if it had many continuations.
    """
    order_A = rewards_A.argsort().argsort()
    tied_A = order_A * LEVELS // len(order_A)
    pieces_A = policy_A.repeat_interleave(PIECES) / PIECES
    apart_A = torch.arange(PIECES).repeat(len(order_A)) + PIECES * order_A.repeat_interleave(PIECES)
    rows: list[dict[str, float]] = []
    for n in SIZES:
        bound, most_wins = kl_bound(n), n / (n + 1)
        best, tied = (BestOf.of(policy_A, r_A, n) for r_A in (order_A, tied_A))
        fine = BestOf.of(pieces_A, apart_A, n)
        for each in (best, tied):
            error = each.estimated_kl - each.kl
            rows.append(
                {
                    "below_bound": bound - each.kl,
                    "below_wins": most_wins - each.win_rate,
                    "over_kl": error,
                    "nearer": (bound - each.kl) - abs(error),
                    "lost_by_ties": best.kl - tied.kl,
                    "missed": max(bound - fine.kl, most_wins - fine.win_rate),
                }
            )
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    of_name = {name: torch.tensor(x, dtype=torch.float64) for name, x in columns.items()}
    found = {
        name: float(each.max() if name == "missed" else each.min())
        for name, each in of_name.items()
    }
    for n in (SIZES[0], SIZES[-1]):
        best = BestOf.of(policy_A, order_A, n)
        found[f"share_{n}"] = (best.estimated_kl - best.kl) / (kl_bound(n) - best.kl)
    return found


def sampler_distance(logits_PV: Tensor, rewards_A: Tensor, generator: torch.Generator) -> float:
    """Return how many standard errors the chi-square of sampled best answers is from its mean.

    Answers are drawn by the rollout's sampler and chosen by ``choose_best``, with and without ties.
    """
    answers = enumerate_answers()
    policy_A = answer_logprobs(logits_PV, answers).sum(dim=1).exp()
    order_A = rewards_A.argsort().argsort()
    square = freedom = 0.0
    for n in SAMPLED_SIZES:
        for worth_A in (order_A, order_A * LEVELS // len(order_A)):
            drawn = sample_answers(logits_PV, answers, DRAWS * n, generator).view(DRAWS, n)
            places = [choose_best(scores, n) for scores in worth_A[drawn].tolist()]
            chosen = drawn[torch.arange(DRAWS), places]
            counts_A = torch.bincount(chosen, minlength=len(policy_A))
            terms = _chi_square(counts_A, DRAWS * BestOf.of(policy_A, worth_A, n).best_A)
            square += float(terms.sum())
            freedom += len(terms) - 1
    return (square - freedom) / (2 * freedom) ** 0.5


def sample_answers(
    logits_PV: Tensor, answers: AnswerTable, count: int, generator: torch.Generator
) -> Tensor:
    """Draw ``count`` answers token by token with the rollout's sampler; return their rows in A."""
    tokens_NT = torch.full((count, MAX_TOKENS), LETTERS)
    prefix_N = torch.zeros(count, dtype=torch.long)
    is_open_N = torch.ones(count, dtype=torch.bool)
    for t in range(MAX_TOKENS):
        draws_N = torch.rand(count, generator=generator)
        drawn_N = draw_tokens(logits_PV[prefix_N].float(), draws_N, SAMPLING).tokens_B
        tokens_NT[:, t] = drawn_N.where(is_open_N, LETTERS)
        is_open_N &= drawn_N != LETTERS
        prefix_N = (prefix_N * LETTERS + drawn_N + 1).where(is_open_N, 0)
    place_T = (LETTERS + 1) ** torch.arange(MAX_TOKENS)
    codes_A = (answers.tokens_AT * place_T).sum(dim=1)
    row_of_code = torch.full(((LETTERS + 1) ** MAX_TOKENS,), -1)
    row_of_code[codes_A] = torch.arange(len(codes_A))
    rows_N: Tensor = row_of_code[(tokens_NT * place_T).sum(dim=1)]
    return rows_N


def _chi_square(counts_A: Tensor, expected_A: Tensor) -> Tensor:
    """Return the terms of the statistic; answers that are expected rarely share one of them."""
    cell_A = (1 + torch.arange(len(expected_A))).masked_fill(expected_A < FEWEST, 0)
    zeros = expected_A.new_zeros(len(expected_A) + 1)
    counts, expected = (
        zeros.index_add(0, cell_A, each_A.double()) for each_A in (counts_A, expected_A)
    )
    used = expected > 0
    return (counts - expected).square()[used] / expected[used]


def measure(seed: int, place: Place) -> Figures:
    """Compare random policies under random rewards with the bounds, and one with its samples."""
    generator = torch.Generator().manual_seed(seed)
    answers = enumerate_answers()
    found: dict[str, list[float]] = {}
    for number in range(4 if place.is_quick else POLICIES):
        logits_PV = SCALES[number % len(SCALES)] * draw_logits(generator, answers)
        policy_A = answer_logprobs(logits_PV, answers).sum(dim=1).exp()
        rewards_A = torch.randn(len(policy_A), generator=generator)
        for name, value in compare(policy_A, rewards_A).items():
            found.setdefault(name, []).append(value)
    logits_PV = draw_logits(generator, answers)
    rewards_A = torch.randn(len(answers.keep_AT), generator=generator)
    return {**found, "sampler": sampler_distance(logits_PV, rewards_A, generator)}


def judge(figures: Mapping[int, Figures]) -> Verdict:
    """Judge all policies of all seeds, and the sampler of each seed."""
    of_all = {name: pooled(figures, name) for name in next(iter(figures.values()))}
    least = {name: float(each.min()) for name, each in of_all.items()}
    most = {name: float(each.max()) for name, each in of_all.items()}
    rules = {
        "KL is below the bound": least["below_bound"] > 0,
        "the win rate is below n / (n + 1)": least["below_wins"] > 0,
        "ties lower the KL": least["lost_by_ties"] >= -ROUNDING,
        "unlikely answers reach both bounds": most["missed"] < REACHED,
        "the estimator is nearer than the bound": least["nearer"] > 0,
        "the estimator is not below the KL": least["over_kl"] >= -ROUNDING,
        "the sampler draws the distribution": most["sampler"] <= STANDARD_ERRORS,
    }
    broken = [rule for rule, holds in rules.items() if not holds]
    shares = [(n, float(of_all[f"share_{n}"].mean())) for n in (SIZES[0], SIZES[-1])]
    found = (
        f"{of_all['nearer'].numel()} policies: KL is {least['below_bound']:.1e} nats or"
        f" more below the bound, and within {most['missed']:.0e} of it for unlikely answers; of the"
        " bound's error the estimator leaves"
        + " and".join(f" {share:.0%} on average at n = {n}" for n, share in shares)
        + f"; chi-square of samples {least['sampler']:+.1f} to {most['sampler']:+.1f} standard"
        " errors" + "".join(f"; not so: {rule}" for rule in broken)
    )
    return Verdict(Outcome.FAILED if broken else Outcome.PASSED, found)


RESULT = PaperResult(
    title="KL and win rate of best of n",
    source="https://arxiv.org/abs/2401.01879 sections 3, 4 and 5",
    claim=(
        "log n - (n - 1) / n is not the KL of best of n but an upper bound, which is reached only"
        " as answers become unlikely; an estimator from the probability of the chosen answer is"
        " nearer; the win rate is at most n / (n + 1)."
    ),
    criterion=(
        f"passed: for every random policy and reward over all answers of at most 3 tokens, and n of"
        f" {', '.join(map(str, SIZES))}, with and without ties: KL and win rate are below their"
        f" bounds, and within {REACHED:.0e} of them once each answer is divided into {PIECES}"
        " pieces; ties do not raise the KL; the mean of the estimator is nearer to the KL than the"
        f" bound, and not below the KL; and the chi-square of {DRAWS:,} best answers of our sampler"
        f" for each n of {SAMPLED_SIZES} is at most {STANDARD_ERRORS} standard errors above its"
        " mean. failed: otherwise."
    ),
    seeds=(1, 2, 3, 4, 5),
    minutes=0.3,
    measure=measure,
    judge=judge,
)
