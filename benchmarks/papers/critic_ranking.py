"""Whether PPO's critic knows which of two alternative steps in the middle of a response is better.

True values are means of continuations (``ppo.critic_check``). Only pairs of states whose true
values differ by more than two standard errors are compared.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from papers.claims import Figures, Outcome, PaperResult, Place, Verdict
from papers.paired import number
from papers.started_runs import run_of
from rlhf.base.intervals import mean_with_interval, wilson_interval
from rlhf_lab.branches.critic_states import CriticState, measure_critic, score_ranked_pairs

CHECK = {"every": 4, "states": 256, "branches": 24, "step_tokens": 2}
QUICK_CHECK = {"every": 2, "states": 32, "branches": 8, "step_tokens": 2}
MIDDLE = (0.2, 0.8)  # places in a response, as shares of its length
BARELY = 0.6  # share of right pairs; chance is 0.5


def states_in(run_dir: Path, *, low: float, high: float) -> list[CriticState]:
    """Return the states at these places, of the second half of the run's checks."""
    rows = list(map(json.loads, (run_dir / "critic.jsonl").read_text().splitlines()))
    steps = sorted({row["step"] for row in rows})
    late = steps[len(steps) // 2 :]
    return [
        CriticState(**{name: row[name] for name in CriticState._fields})
        for row in rows
        if row["step"] in late and low <= row["place"] < high
    ]


def measure(seed: int, place: Place) -> Figures:
    """Return the ranked pairs of the default run's PPO, and how many of them are right."""
    check = QUICK_CHECK if place.is_quick else CHECK
    words = [f"ppo.critic_check.{name}={value}" for name, value in check.items()]
    run_dir = run_of(place, *words, seed=seed)
    low, high = MIDDLE
    pairs = score_ranked_pairs(states_in(run_dir, low=low, high=high))
    found: Figures = {"pairs": float(len(pairs)), "right": sum(pairs)}
    parts = {"all": (0.0, 1.0), "beginning": (0.0, low), "middle": MIDDLE, "end": (high, 1.0)}
    for part, (start, end) in parts.items():
        measures = measure_critic(states_in(run_dir, low=start, high=end))
        found |= {f"{name}, {part}": value for name, value in measures.items()}
    return found


def judge(found: Mapping[int, Figures]) -> Verdict:
    """Compare the share of right pairs of all seeds together with chance."""
    pairs, right = (
        sum(float(str(figures[name])) for figures in found.values()) for name in ("pairs", "right")
    )
    if not pairs:
        return Verdict(Outcome.OPEN, "no pair of states has true values that differ")
    low, high = wilson_interval(right, pairs)
    words = f"the better step has the higher value in {right / pairs:.3f} of {pairs:.0f} pairs "
    words += f"from the middle of responses (95 % interval {low:.3f} to {high:.3f}; chance 0.5)"
    counted = [each for each in found.values() if each["pairs"]]
    shares = [number(each, "right") / number(each, "pairs") for each in counted]
    seeds = mean_with_interval(shares)
    words += f"; by seed {', '.join(f'{each:.3f}' for each in shares)}, Student's interval over "
    words += f"seeds {seeds.low:.2f} to {seeds.high:.2f}"
    if high < BARELY:
        return Verdict(Outcome.PASSED, words)
    return Verdict(Outcome.FAILED if low > BARELY else Outcome.OPEN, words)


RESULT = PaperResult(
    title="The critic's ranking of alternative steps",
    source="Kazemnejad et al., VinePPO, https://arxiv.org/abs/2410.01679, section 7",
    claim="PPO's value network barely outperforms a random baseline when it compares alternative "
    "steps from one state.",
    criterion="The default run's PPO, second half of its steps, pairs of states that follow "
    "alternative steps of two tokens and lie between a fifth and four fifths of the response; true "
    "values are means of 24 continuations, and pairs whose true values differ by at most two "
    "standard errors are dropped. Share of pairs whose better state has the higher value, of all "
    "seeds together, with Wilson's 95 % interval. Passed: the interval lies below 0.6. Failed: it "
    "lies above 0.6.",
    note="Wilson's interval takes 336 pairs of three runs as independent, which they are not "
    "(chi-square 7.3, p = 0.026). The interval over seeds also lies above 0.6: the outcome stays.",
    seeds=(2, 3, 4),  # seed 1 showed the code at work
    minutes=7,
    measure=measure,
    judge=judge,
)
