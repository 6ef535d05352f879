"""How much data a reward model needs before its choices raise the gold score."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

from judge_run import RewardModel

from papers.best_of_many import draw, gold_of_best, scored
from papers.claims import Figures, Outcome, PaperResult, Place, Verdict
from papers.paired import difference, mean_over, told
from papers.started_runs import run_of

EPOCHS = (0.01, 0.03, 0.1, 0.3, 1.0)  # shares of the pairs: none is seen twice
SIZES = (1, 2, 4, 8, 16, 32, 64)


def measure(seed: int, place: Place) -> Figures:
    """Return the gold score of best of n, for reward models of each share of the pairs."""
    found: Figures = {}
    drawn = None
    for epochs in EPOCHS:
        # PPO is not wanted, but without it the data would be divided in another way.
        short = ("ppo.steps=1", "ppo.eval_prompts=16", "ppo.eval_every=0")
        run_dir = run_of(place, f"reward.epochs={epochs}", *short, seed=seed)
        drawn = drawn or draw(run_dir, place, prompts=300, each=128, seed=seed)
        scores_PN = scored(drawn, RewardModel.of(run_dir / "reward" / "model").scores)
        for n in SIZES:
            found[f"gold, best of {n}, {epochs:g}"] = gold_of_best(scores_PN, drawn.gold_PN, n)
    return found


def judge(found: Mapping[int, Figures]) -> Verdict:
    """Compare the shares at best of 64, and the smallest share with no choice at all."""
    names = [f"gold, best of 64, {epochs:g}" for epochs in EPOCHS]
    means = [mean_over(found, name).mean for name in names]
    whole = difference(found, names[-1], names[0])
    words = (
        "gold of best of 64 with "
        + ", ".join(f"{e:.0%} {m:.3f}" for e, m in zip(EPOCHS, means, strict=True))
        + f" of the pairs; all to fewest {told(whole)}"
    )
    rises = all(a < b for a, b in itertools.pairwise(means))
    if rises and whole.low > 0:
        return Verdict(Outcome.PASSED, words)
    return Verdict(Outcome.FAILED if whole.high < 0 or not rises else Outcome.OPEN, words)


RESULT = PaperResult(
    title="More comparisons, more gold",
    source="Gao et al., https://arxiv.org/abs/2210.10760, section 3.3",
    claim="With more comparisons the gold score under optimisation rises, from hardly more than "
    "chance with the fewest.",
    criterion="Best of 64 by reward models of 1, 3, 10, 30 and 100 % of the pairs. Passed: mean "
    "gold rises with each share, and the interval of 100 % minus 1 % lies above 0. Failed: mean "
    "gold falls with a share, or that interval lies below 0.",
    seeds=(1, 2, 3),
    minutes=10,
    measure=measure,
    judge=judge,
)
