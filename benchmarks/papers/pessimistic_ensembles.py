"""Several reward models against over-optimisation: the worst of five, and mean minus variance."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from evaluated import evaluations

from papers.claims import Figures, Outcome, PaperResult, Place, Verdict
from papers.paired import difference, told
from papers.started_runs import gold_figures, run_of

MEMBERS = ("reward.members=5", "reward.member_epochs=0.03")  # as many pairs as the first member
ARMS = {
    "single": (),
    "worst": (*MEMBERS, "reward.combine=worst"),
    "uncertainty": (*MEMBERS, "reward.combine=uncertainty", "reward.uncertainty_coef=0.1"),
    "mean": (*MEMBERS, "reward.combine=mean"),
}


def measure(seed: int, place: Place) -> Figures:
    """Return the gold score before, at its best and after 80 steps without a penalty."""
    return gold_of_arms(seed, place)


def gold_of_arms(
    seed: int, place: Place, *overrides: str, of_ensembles: Sequence[str] = ()
) -> Figures:
    """Return the gold score of each arm along PPO, with these overrides in addition."""
    found: Figures = {}
    for arm, own in ARMS.items():
        words = [*own, *overrides, *(of_ensembles if own else ())]
        curve = evaluations(run_of(place, "experiment=overoptimised", *words, seed=seed))
        found |= gold_figures(arm, curve)
        found[f"best gold, {arm}"] = max(each.gold for each in curve)
    return found


def judge(found: Mapping[int, Figures]) -> Verdict:
    """Compare the gold score after PPO with that of the single model, seed by seed."""
    gains = {arm: difference(found, f"gold after, {arm}", "gold after, single") for arm in ARMS}
    words = "gold after PPO, to a single model: " + ", ".join(
        f"{arm} {told(gains[arm])}" for arm in ("worst", "uncertainty", "mean")
    )
    judged = gains["worst"], gains["uncertainty"]
    if all(each.low > 0 for each in judged):
        return Verdict(Outcome.PASSED, words)
    failed = any(each.high < 0 for each in judged)
    return Verdict(Outcome.FAILED if failed else Outcome.OPEN, words)


RESULT = PaperResult(
    title="Pessimistic ensembles",
    source="Coste et al., https://arxiv.org/abs/2310.02743, section 5",
    claim="The worst case of five reward models, and their mean minus their variance, reduce "
    "over-optimisation by PPO and reach more gold than a single model.",
    criterion="experiment=overoptimised (3 % of the pairs, no penalty) with one reward model, and "
    "with five; gold after 80 steps, paired by seed. Passed: the intervals of worst and of "
    "uncertainty, minus single, lie above 0. Failed: one of them lies below 0. The labels are "
    "Bradley-Terry's, not flipped; the members share their lower layers.",
    seeds=(1, 2, 3, 4, 5),
    minutes=12,
    measure=measure,
    judge=judge,
)
