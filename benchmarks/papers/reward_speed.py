"""A flat reward beside a noisy one without a KL penalty: the second criterion of reward_variance.

There the penalty is 20 times as strong beside the flat reward, which stops at a KL of 0.2 nats.
"""

from __future__ import annotations

from collections.abc import Mapping

from evaluated import evaluations

from papers.claims import Figures, PaperResult, Place, Verdict
from papers.paired import difference, gains, told
from papers.started_runs import gold_figures, reward_by, run_of

REWARDS = ("accurate_flat", "noisy")
EARLY = 7  # steps after which speed is compared
SMALL = 0.03  # of the gold score: a smaller gain would not be noticed
RECIPE = (
    "experiment=gold_rloo",
    "ppo.kl_ctl=0",
    "ppo.whiten_advantages=false",  # it would make all spreads equal
    "ppo.lr_schedule=constant",
    f"ppo.steps={2 * EARLY}",
    f"ppo.eval_every={EARLY}",
)


def measure(seed: int, place: Place) -> Figures:
    """Return the gold score along RLOO, with each of the two rewards."""
    found: Figures = {}
    for name in REWARDS:
        curve = evaluations(run_of(place, *RECIPE, reward_by(name), seed=seed))
        found |= gold_figures(name, curve)
        found[f"gold early, {name}"] = curve[-2].gold
    return found


def judge(found: Mapping[int, Figures]) -> Verdict:
    """Compare what the noisy and the flat reward teach in the first steps, seed by seed."""
    gain = difference(found, "gold early, noisy", "gold early, accurate_flat")
    later = difference(found, "gold after, noisy", "gold after, accurate_flat")
    words = (
        f"gold, noisy to accurate and flat, after {EARLY} steps {told(gain)}, after {2 * EARLY} "
        f"steps {told(later)}"
    )
    return gains(gain, words, small=SMALL)


RESULT = PaperResult(
    title="Reward variance and speed without a penalty",
    source="Razin et al., https://arxiv.org/abs/2503.15477, theorem 2 and section 4",
    claim="A perfectly accurate reward model whose scores of responses to one prompt hardly vary "
    "teaches more slowly than a less accurate one whose scores vary.",
    criterion="As for reward variance and speed, whose KL penalty of 0.02 is 20 times as strong "
    "beside the flat reward, but without a penalty, and at a constant rate. AdamW, as there. Gold "
    f"after {EARLY} steps, noisy minus flat, paired by seed. Passed: the interval lies above 0. "
    f"Failed: it lies below {SMALL}.",
    note="AdamW removes the scale of gradients, so that a flat reward costs nothing here and noise "
    "does; the theorem is about gradient flow. Measured on an AMD EPYC Zen 3 (family 25, model 1), "
    "AVX2, fp32, on a busy machine; the criterion's commit is 9b5e6454 since a rebase.",
    seeds=(1, 2, 3, 4, 5),
    minutes=4,
    measure=measure,
    judge=judge,
)
