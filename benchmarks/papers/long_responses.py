"""Whether PPO on long responses gains from a critic that learns first, and from whole returns."""

from __future__ import annotations

from collections.abc import Mapping

from evaluated import evaluations

from papers.claims import Figures, PaperResult, Place, Verdict
from papers.paired import difference, gains, told
from papers.started_runs import gold_figures, run_of

STEPS = 28  # in which the actor learns
FIRST = 21  # in which only the critic learns
SMALL = 0.03  # of the gold score: a smaller gain would not be noticed
ARMS = ("PPO", "VC-PPO")
BYTES = (
    "experiment=gold_ppo",
    "model.vocab_size=265",  # bytes: a response has about 25 tokens, and lambda 0.85 reaches 7
    "rollout.max_response_tokens=64",
    "ppo.eval_every=7",
)


def measure(seed: int, place: Place) -> Figures:
    """Return the gold score along PPO and along VC-PPO."""
    first = 2 if place.is_quick else FIRST
    later = (f"ppo.steps={first + STEPS}", f"ppo.actor_freeze_steps={first}", "ppo.lam_critic=1")
    found: Figures = {}
    for name, words in zip(ARMS, ((f"ppo.steps={STEPS}",), later), strict=True):
        curve = evaluations(run_of(place, *BYTES, *words, seed=seed))
        found |= gold_figures(name, curve)
        found[f"lowest gold, {name}"] = min(each.gold for each in curve)
    return found


def judge(found: Mapping[int, Figures]) -> Verdict:
    """Compare the gold score after VC-PPO and after PPO, seed by seed."""
    gain = difference(found, "gold after, VC-PPO", "gold after, PPO")
    falls = (difference(found, f"lowest gold, {name}", f"gold before, {name}") for name in ARMS)
    words = f"gold after as many steps of the actor, VC-PPO to PPO {told(gain)}; lowest gold on "
    words += "the way to gold before, PPO {}, VC-PPO {}".format(*map(told, falls))
    return gains(gain, words, small=SMALL)


RESULT = PaperResult(
    title="Value pretraining and decoupled lambdas",
    source="Yuan et al., VC-PPO, https://arxiv.org/abs/2503.01491, sections 3 and 4",
    claim="On long responses PPO fails because its critic starts biased and the reward decays "
    "before it reaches early tokens; pretraining the critic on returns and a lambda of 1 for its "
    "targets repair it.",
    criterion=f"experiment=gold_ppo on bytes, about 25 tokens per response, lambda 0.85. PPO for "
    f"{STEPS} steps; VC-PPO with ppo.lam_critic=1 for {FIRST} steps of the critic alone and then "
    f"{STEPS} of both. Gold after, paired by seed. Passed: the interval lies above 0. Failed: it "
    f"lies below {SMALL}.",
    seeds=(1, 2, 3, 4),  # seed 0 showed the code at work, with other steps and schedules
    minutes=8,
    measure=measure,
    judge=judge,
)
