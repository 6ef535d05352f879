"""How far a policy may run ahead of the weights that sample: one step costs nothing, many do."""

from __future__ import annotations

from collections.abc import Mapping

from papers.claims import Figures, Outcome, PaperResult, Place, Verdict
from papers.paired import difference, told
from papers.started_runs import ppo_result, run_of

LAGS = (0, 1, 2, 4, 8)
MARGIN = 0.03  # of the gold score: a smaller difference costs nothing that a user would notice


def measure(seed: int, place: Place) -> Figures:
    """Return the gold score and the KL after the default run's PPO, for each lag."""
    found: Figures = {}
    for lag in LAGS:
        result = ppo_result(run_of(place, f"rollout.lag={lag}", seed=seed))
        found |= {f"gold, lag {lag}": result["gold_after"], f"KL, lag {lag}": result["kl_after"]}
    return found


def judge(found: Mapping[int, Figures]) -> Verdict:
    """Compare lag 1 and lag 8 with lag 0, seed by seed."""
    one, eight = (difference(found, f"gold, lag {lag}", "gold, lag 0") for lag in (1, 8))
    words = f"gold at lag 1 {told(one)}, at lag 8 {told(eight)}, to lag 0"
    if one.low > -MARGIN and eight.high < 0:
        return Verdict(Outcome.PASSED, words)
    if one.high < -MARGIN or eight.low > -MARGIN:
        return Verdict(Outcome.FAILED, words)
    return Verdict(Outcome.OPEN, words)


RESULT = PaperResult(
    title="Responses of older weights",
    source="Noukhovitch et al., https://arxiv.org/abs/2410.18252, sections 3 and 4",
    claim="Training on responses that are one step old matches synchronous training; the older "
    "the responses, the less PPO reaches.",
    criterion="Gold after the default run's PPO, paired by seed with lag 0. Passed: the interval "
    "of lag 1 lies above -0.03 and that of lag 8 below 0. Failed: the interval of lag 1 lies "
    "below -0.03, or that of lag 8 above -0.03.",
    note="The figures were read from runs of benchmarks/staleness.py that had finished; nothing "
    "shows that these began after the criterion was committed, and the commit below does "
    "not have this row.",
    seeds=(1, 2, 3, 4, 5),
    minutes=10,
    measure=measure,
    judge=judge,
)
