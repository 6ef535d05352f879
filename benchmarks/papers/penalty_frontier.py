"""Whether a KL penalty reaches a higher gold score at the same KL, or only stops earlier."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Mapping, Sequence

from evaluated import Evaluated, evaluations

from papers.claims import Figures, PaperResult, Place, Verdict
from papers.paired import mean_over, told, within
from papers.started_runs import run_of

MARGIN = 0.03  # of the gold score
PENALTY = 0.1


def gold_at(curve: Sequence[Evaluated], kl: float) -> float | None:
    """Return the gold score where the curve first reaches ``kl``, by straight lines between."""
    for before, after in itertools.pairwise(curve):
        if before.kl <= kl <= after.kl and before.kl < after.kl:
            share = (kl - before.kl) / (after.kl - before.kl)
            return before.gold + share * (after.gold - before.gold)
    return None


def measure(seed: int, place: Place) -> Figures:
    """Return the mean difference in gold at equal KL, with a penalty minus without one."""
    free, held = (
        evaluations(run_of(place, "experiment=overoptimised", *more, seed=seed))
        for more in ((), (f"ppo.kl_ctl={PENALTY}",))
    )
    pairs = [(each.gold, gold) for each in held[1:] if (gold := gold_at(free, each.kl)) is not None]
    return {
        "difference": statistics.fmean(a - b for a, b in pairs) if pairs else float("nan"),
        "points compared": len(pairs),
        "last KL, free": free[-1].kl,
        "last KL, held": held[-1].kl,
        "last gold, free": free[-1].gold,
        "last gold, held": held[-1].gold,
    }


def judge(found: Mapping[int, Figures]) -> Verdict:
    """Look whether the mean difference over the seeds lies within the margin."""
    estimate = mean_over(found, "difference")
    return within(
        estimate, MARGIN, f"gold at equal KL, with a penalty to without: {told(estimate)}"
    )


RESULT = PaperResult(
    title="A KL penalty and the gold frontier",
    source="Gao et al., https://arxiv.org/abs/2210.10760, section 3.6",
    claim="A KL penalty does not move gold as a function of KL: it acts like stopping earlier.",
    criterion="experiment=overoptimised with ppo.kl_ctl=0.1 and 0: mean difference in gold over "
    "the evaluations with a penalty, at their KL. Passed: its interval over seeds lies within "
    "±0.03. Failed: it lies outside.",
    note="Seeds 1 to 3 without a penalty had been drawn before the criterion was committed. The "
    "interval excludes 0 (p = 0.017), which contradicts the claim at 5 %, by less than the "
    "margin; three of five seeds compare at a KL below 0.7 only.",
    seeds=(1, 2, 3, 4, 5),
    minutes=8,
    measure=measure,
    judge=judge,
)
