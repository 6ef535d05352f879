"""Warn of doubtful results, from the measurements that the phases of a run have stored.

A rising score can look like success when it is not. These rules detect a reward model that guesses,
responses that collapse, a policy that left its reference or exploits its reward model, and rewards
that said nothing about most responses.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rlhf.base.finite_numbers import find_non_finite
from rlhf.base.intervals import mean_of
from rlhf.base.packaged_yaml import read_yaml_beside
from rlhf.report.charts import PointsByMetric

CHANCE = 0.5  # accuracy of a reward model that guesses
TOO_GOOD = 0.99  # people's preferences are too noisy for this accuracy
WIDE = 0.2  # width of an accuracy's 95 % interval above which to warn; about that of 100 pairs
LENGTH_FACTOR = 2.0  # largest factor by which the mean length of responses may change
MOST_KL = 0.3  # nats per response token; metrics.yaml gives the same limit
FEW_ENDED = 0.5  # warn if a smaller share of responses ended by themselves
MOST_FALLBACKS = 0.05  # warn if a larger share of training responses got fallback scores
MOST_WITHOUT_SIGNAL = 0.5  # warn if a larger share of steps, or of groups, has equal scores only
ROUNDING = 1e-6  # smaller standard deviations of scores are rounding; relative if scores exceed 1
HELD = {"ppo": "ppo.kl_ctl", "dpo": "dpo.beta"}  # the key that holds a policy to its reference
RATE = {"ppo": "ppo.actor_lr", "dpo": "dpo.lr"}  # the key of the policy's learning rate
FEWER = {"ppo": "ppo.steps", "dpo": "dpo.epochs"}  # the key that shortens training
TEXTS = read_yaml_beside(__file__, "doubts.yaml")
NO_INTERVAL = (0.0, 0.0)  # replaces a missing interval; it excludes nothing


def find_doubts(phases: Mapping[str, Mapping[str, Any]], series: PointsByMetric) -> list[str]:
    """Return one line, with a suggestion, for each reason to doubt the results of ``phases``."""
    lines = [f"{name} is not a finite number" for name in find_non_finite(phases)]
    for name in ("reward", "dpo"):
        if name in phases:
            lines += _doubts_of_pairs(name, phases[name])
    for name in ("ppo", "dpo"):
        if name in phases:
            lines += _doubts_of_policy(name, phases[name])
    if "ppo" in phases:
        lines += _doubts_of_rewards(series, has_risen=_lowest_gain(phases["ppo"]) > 0)
    return lines


def _doubts_of_pairs(phase: str, measures: Mapping[str, Any]) -> Iterator[str]:
    low, high = measures["accuracy_ci"]
    is_synthetic = "best_possible_accuracy" in measures
    if low <= CHANCE:
        yield TEXTS["guesses"].format(phase=phase, low=low, high=high, chance=CHANCE)
    elif phase == "reward" and measures["accuracy"] >= TOO_GOOD and not is_synthetic:
        yield TEXTS["too_good"].format(phase=phase, accuracy=measures["accuracy"])
    elif high - low > WIDE:
        yield TEXTS["wide"].format(phase=phase, low=low, high=high)


def _doubts_of_policy(phase: str, measures: Mapping[str, Any]) -> Iterator[str]:
    before, after = measures.get("response_tokens_before"), measures.get("response_tokens_after")
    if before and after is not None and not 1 / LENGTH_FACTOR <= after / before <= LENGTH_FACTOR:
        yield TEXTS["length"].format(phase=phase, before=before, after=after)
    ended = measures.get("ended_share_after")
    if ended is not None and ended < FEW_ENDED:
        or_penalty = " or ppo.missing_end_penalty" if phase == "ppo" else ""
        yield TEXTS["few_ended"].format(phase=phase, ended=ended, or_penalty=or_penalty)
    kl = measures.get("kl_to_reference")
    has_mastered = "return_after" in measures and _lowest_gain(measures) > 0  # an environment
    keys = {"phase": phase, "held": HELD[phase], "rate": RATE[phase], "fewer": FEWER[phase]}
    if kl is not None and after and kl / after > MOST_KL and not has_mastered:
        yield TEXTS["kl"].format(kl=kl / after, most=MOST_KL, **keys)
    scorer, cure = "reward model", "train a better reward model"
    if "score_parts_after" in measures:
        scorer, cure = "rewards", "correct the parts of rewards"
    judges = {"gold score": measures.get("gold_gain_ci", NO_INTERVAL)}
    judges |= {f"judge's {name}": gain for name, gain in measures.get("judge_gains", {}).items()}
    for judge, (lowest_gain, highest_gain) in judges.items():
        if _lowest_gain(measures) > 0 > highest_gain:
            yield TEXTS["exploits"].format(judge=judge, scorer=scorer, cure=cure, **keys)
        elif judge != "gold score" and _lowest_gain(measures) > 0 > lowest_gain:
            gain = {"low": lowest_gain, "high": highest_gain}
            yield TEXTS["unmoved"].format(phase=phase, judge=judge, **gain)


def _doubts_of_rewards(series: PointsByMetric, *, has_risen: bool) -> Iterator[str]:
    """Yield a line if many rewards failed, and a line if in most steps all scores were equal.

    Scores that differed at the first step and became equal while they rose are no reason to doubt.
    """
    failed = mean_of([share for _, share in series.get("ppo/fallback_share", ())])
    if failed > MOST_FALLBACKS:
        yield TEXTS["failed"].format(failed=failed)
    equal = {
        "equal_scores": _equal_shares(series, "ppo/score"),
        "equal_clipped": _equal_shares(series, "ppo/clipped_score"),
        "equal_groups": [share for _, share in series.get("ppo/equal_group_share", ())],
    }
    for name, shares in equal.items():
        if _lacks_signal(shares, has_risen=has_risen):
            share = mean_of(shares)
            yield TEXTS[name].format(count=sum(shares), steps=len(shares), share=share)
            return


def _lacks_signal(equal: Sequence[float], *, has_risen: bool) -> bool:
    """Return True if ``equal``, a share of equal scores per step, shows a lost learning signal."""
    is_best = has_risen and min(equal[:1], default=1.0) < 1
    return mean_of(equal) > MOST_WITHOUT_SIGNAL and not is_best


def _equal_shares(series: PointsByMetric, name: str) -> list[float]:
    """Return 1 for each step in which all responses had the same score ``name``, otherwise 0."""
    means, deviations = (series.get(f"{name}_{each}", ()) for each in ("mean", "std"))
    return [
        float(deviation <= ROUNDING * max(1.0, abs(mean)))
        for (_, mean), (_, deviation) in zip(means, deviations, strict=False)
    ]


def _lowest_gain(measures: Mapping[str, Any]) -> float:
    """Return the lower end of the interval of the score's gain; 0 without an interval."""
    low: float = measures.get("score_gain_ci", NO_INTERVAL)[0]
    return low
