"""Two laws of over-optimisation: how the gold score depends on the distance from the SFT model."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from evaluated import evaluations
from judge_run import RewardModel

from papers.best_of_many import distance_of_best, draw, gold_of_best, scored
from papers.claims import Figures, Outcome, PaperResult, Place, Verdict
from papers.paired import mean_over, number
from papers.started_runs import run_of

SIZES = (1, 2, 4, 8, 16, 32, 64)
FORMS = {"best-of-n": lambda d: d, "RL": math.log}
"""The gain of gold is d (alpha - beta f(d)), with this f."""
ENOUGH, TOO_FEW = 4, 2  # of five seeds


def fitted(distances: Sequence[float], gains: Sequence[float], form: str) -> dict[str, float]:
    """Return alpha, beta and the residual sum of squares of the form, by least squares."""
    d_K = torch.tensor(distances, dtype=torch.float64)
    f_K = torch.tensor([FORMS[form](d) for d in distances], dtype=torch.float64)
    design_K2 = torch.stack((d_K, -d_K * f_K), dim=1)
    gains_K1 = torch.tensor(gains, dtype=torch.float64)[:, None]
    factors_21 = torch.linalg.lstsq(design_K2, gains_K1).solution
    residual = float((design_K2 @ factors_21 - gains_K1).square().sum())
    return {"alpha": float(factors_21[0]), "beta": float(factors_21[1]), "residual": residual}


def measure(seed: int, place: Place) -> Figures:
    """Fit both forms to PPO's curve without a penalty, and to that of best of n."""
    run_dir = run_of(place, "experiment=overoptimised", seed=seed)
    start, *steps = evaluations(run_dir)
    steps = [each for each in steps if each.kl > 0]
    drawn = draw(run_dir, place, prompts=300, each=128, seed=seed)
    scores_PN = scored(drawn, RewardModel.of(run_dir / "reward" / "model").scores)
    best = [gold_of_best(scores_PN, drawn.gold_PN, n) for n in SIZES]
    curves = {
        "PPO": ([math.sqrt(each.kl) for each in steps], [each.gold - start.gold for each in steps]),
        "best of n": (
            [distance_of_best(n) for n in SIZES[1:]],
            [each - best[0] for each in best[1:]],
        ),
    }
    found: Figures = {}
    for curve, (distances, gains) in curves.items():
        found |= {f"distances, {curve}": distances, f"gains, {curve}": gains}
        for form in FORMS:
            for name, value in fitted(distances, gains, form).items():
                found[f"{name}, {curve}, {form} form"] = value
    return found


def judge(found: Mapping[int, Figures]) -> Verdict:
    """Count the seeds in which each curve has its own form."""

    def has_own_form(figures: Figures, curve: str, own: str, other: str) -> bool:
        own, other = (f"residual, {curve}, {form} form" for form in (own, other))
        return number(figures, own) < number(figures, other)

    rl = sum(has_own_form(each, "PPO", "RL", "best-of-n") for each in found.values())
    best = sum(has_own_form(each, "best of n", "best-of-n", "RL") for each in found.values())
    words = f"of {len(found)} seeds, PPO has the RL form in {rl}, best of n its own in {best}"
    for curve, form in (("PPO", "RL"), ("best of n", "best-of-n")):
        for name in ("alpha", "beta"):
            factor = mean_over(found, f"{name}, {curve}, {form} form")
            words += f"; {name} of {curve} {factor.mean:.3f} ± {factor.half:.3f}"
    if min(rl, best) >= ENOUGH:
        return Verdict(Outcome.PASSED, words)
    return Verdict(Outcome.FAILED if min(rl, best) <= TOO_FEW else Outcome.OPEN, words)


RESULT = PaperResult(
    title="Two laws of over-optimisation",
    source="Gao et al., https://arxiv.org/abs/2210.10760, section 3.1",
    claim="With d the square root of KL, gold gains d (alpha - beta d) by best of n, and "
    "d (alpha - beta log d) by reinforcement learning.",
    criterion="A reward model of 3 % of the pairs; PPO without a penalty (an evaluation every 2 "
    "steps), and best of 2 to 64. Passed: in at least 4 of 5 seeds the RL form leaves the smaller "
    "sum of squares on PPO's curve, and in at least 4 the best-of-n form on the other. Failed: "
    "either in at most 2.",
    note="Seeds 1 to 3 of this experiment had been drawn as gold over the square root of KL "
    "before the criterion was committed; 4 and 5 were unseen. Alpha of PPO is about 0, "
    "though gold rises by 0.013 to 0.034 before it falls by 0.37 to 0.66: what was shown is "
    "that the falling branch is nearer to d log d, in seed 3 narrowly (0.0065 against "
    "0.0072 of 0.51).",
    seeds=(1, 2, 3, 4, 5),
    minutes=4,
    measure=measure,
    judge=judge,
)
