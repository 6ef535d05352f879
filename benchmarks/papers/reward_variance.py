"""A reward model can order all responses rightly and still teach slowly, if it hardly varies."""

from __future__ import annotations

from collections.abc import Mapping

from evaluated import evaluations

from papers.claims import Figures, PaperResult, Place, Verdict
from papers.paired import difference, gains, told
from papers.started_runs import gold_figures, reward_by, run_of

REWARDS = ("accurate", "accurate_flat", "noisy")
RECIPE = (
    "experiment=gold_rloo",
    "ppo.whiten_advantages=false",  # it would make all spreads equal
    "ppo.steps=28",
    "ppo.eval_every=7",
)


def measure(seed: int, place: Place) -> Figures:
    """Return the gold score along RLOO, with each of the constructed rewards."""
    found: Figures = {}
    for name in REWARDS:
        run_dir = run_of(place, *RECIPE, reward_by(name), seed=seed)
        found |= gold_figures(name, evaluations(run_dir))
    return found


def judge(found: Mapping[int, Figures]) -> Verdict:
    """Compare what the noisy and the flat reward teach in as many steps, seed by seed."""
    gain = difference(found, "gold after, noisy", "gold after, accurate_flat")
    control = difference(found, "gold after, accurate", "gold after, noisy")
    words = (
        f"gold after 28 steps, noisy to accurate and flat {told(gain)}; "
        f"accurate to noisy, both with spread, {told(control)}"
    )
    return gains(gain, words)


RESULT = PaperResult(
    title="Reward variance and speed",
    source="Razin et al., https://arxiv.org/abs/2503.15477, theorem 2 and section 4",
    claim="A perfectly accurate reward model whose scores of responses to one prompt hardly vary "
    "teaches more slowly than a less accurate one whose scores vary.",
    criterion="RLOO for 28 steps, advantages not whitened, with gold and its differences times "
    "0.05 (all pairs right), and with gold plus a fixed error of deviation 0.3 for each response. "
    "Gold after, noisy minus flat, paired by seed. Passed: the interval lies above 0. Failed: "
    "below 0.",
    note="The penalty of 0.02 is 20 times as strong beside the flat reward. After 7 steps both "
    "arms were equally fast (noisy minus flat -0.002); then the flat arm stopped at a KL of "
    "0.19, near the optimum of its reward minus the penalty. The gap is where the penalty "
    "stops, not speed: the row without a penalty measures speed.",
    seeds=(1, 2, 3, 4, 5),
    minutes=3,
    measure=measure,
    judge=judge,
)
