"""Warn of doubtful results, from the measurements that the phases of a run have stored.

A rising score can look like success when it is not. These rules detect a reward model that guesses
or is suspiciously good, responses of changed length or without an end, a policy that is far from
its reference or exploits its reward, rewards that fail, and scores that are equal too often.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from rlhf.base.finite_numbers import non_finite_names
from rlhf.base.intervals import mean_of
from rlhf.base.packaged_yaml import read_yaml_beside
from rlhf.config.schema.run import AlarmName
from rlhf.report.charts import PointsByMetric, read_metric_series
from rlhf.report.gain import is_score_alone, judge_intervals, least_score_gain, read_gain
from rlhf.report.run_charts import report_parts
from rlhf.run.results import finished_phases, read_phase_result
from rlhf.run.step_alarms import read_alarms

CHANCE = 0.5  # accuracy of a reward model that guesses
TOO_GOOD = 0.99  # warn from this accuracy on: people's preferences are too noisy to allow it
WIDE = 0.2  # warn if an accuracy's 95 % interval is wider; 100 pairs give about this width
LENGTH_FACTOR = 2.0  # largest factor by which the mean length of responses may change
MOST_KL = 0.3  # nats per response token; warn above this KL, which metrics.yaml names too
FEW_ENDED = 0.5  # warn if a smaller share of responses ended by themselves
MOST_FALLBACKS = 0.05  # warn if a larger share of training responses got fallback scores
MOST_WITHOUT_SIGNAL = 0.5  # warn if all scores are equal in a larger share of steps or groups
ROUNDING = 1e-6  # scores count as equal up to this std, relative to their mean if it is above 1
PENALTY_KEYS = {"ppo": "ppo.kl_ctl", "dpo": "dpo.beta"}  # keep a policy near its reference
RATE_KEYS = {"ppo": "ppo.actor_lr", "dpo": "dpo.lr"}  # the policy's learning rate
DURATION_KEYS = {"ppo": "ppo.steps", "dpo": "dpo.epochs"}  # smaller values shorten training
TABLES = read_yaml_beside(__file__, "doubts.yaml")
REMEDIES: Mapping[str, Mapping[str, Any]] = TABLES["remedies"]
MOST_KL_UNMOVED = 0.1  # nats per response; a policy with a smaller KL, ...
MOST_CLIPPED_UNMOVED = 0.01  # ... and a smaller clip fraction, has hardly moved


class Doubt(NamedTuple):
    """A reason to doubt a run: a line, its phase, and the name of the remedy to try first."""

    line: str
    phase: str = ""
    remedy: str | None = None


def read_doubts(run_dir: Path) -> list[Doubt]:
    """Return the doubts of a run: from its alarms, a divergence first, then from its results."""
    remedies: Mapping[str, str] = TABLES["alarms"]
    alarms = sorted(read_alarms(run_dir), key=lambda each: each.name != AlarmName.not_finite)
    of_alarms = [Doubt(alarm.line, alarm.phase, remedies.get(alarm.name)) for alarm in alarms]
    names = map(str, finished_phases(run_dir))
    phases = {name: read_phase_result(run_dir, name) or {} for name in names}
    return [*of_alarms, *find_doubts(phases, read_metric_series(run_dir))]


def _doubt(name: str, **values: Any) -> Doubt:
    """Return the doubt ``name`` of doubts.yaml with ``values`` in its text."""
    entry, phase = TABLES["doubts"][name], values.get("phase", "ppo")
    return Doubt(entry["text"].format(**values), phase, entry.get("remedy"))


def find_doubts(phases: Mapping[str, Mapping[str, Any]], series: PointsByMetric) -> list[Doubt]:
    """Return each reason to doubt the results of ``phases``, most with a suggestion."""
    doubts = [Doubt(f"{name} is not a finite number") for name in non_finite_names(phases)]
    for name in ("reward", "dpo"):
        if name in phases:
            doubts += _accuracy_doubts(name, phases[name])
    for name in ("ppo", "dpo"):
        if name in phases:
            doubts += _policy_doubts(name, phases[name])
    if (ppo := phases.get("ppo")) is not None:
        doubts += [Doubt(line) for part in report_parts() for line in part.doubts(phases)]
        of_rewards = [*_reward_doubts(series, has_risen=least_score_gain(ppo) > 0)]
        doubts += of_rewards or _gain_doubts(ppo, series)
    return doubts


def _accuracy_doubts(phase: str, measures: Mapping[str, Any]) -> Iterator[Doubt]:
    low, high = measures["accuracy_ci"]
    is_synthetic = "best_possible_accuracy" in measures
    if low <= CHANCE:
        yield _doubt("guesses", phase=phase, low=low, high=high, chance=CHANCE)
    elif phase == "reward" and measures["accuracy"] >= TOO_GOOD and not is_synthetic:
        yield _doubt("too_good", phase=phase, accuracy=measures["accuracy"])
    elif high - low > WIDE:
        yield _doubt("wide", phase=phase, low=low, high=high)


def _policy_doubts(phase: str, measures: Mapping[str, Any]) -> Iterator[Doubt]:
    values = {"phase": phase, "penalty_key": PENALTY_KEYS[phase], "rate_key": RATE_KEYS[phase]}
    values |= {"duration_key": DURATION_KEYS[phase]}
    values |= {"scorer": "reward model", "cure": "train a better reward model"}
    if "score_parts_after" in measures:
        values |= {"scorer": "rewards", "cure": "correct the parts of `rewards`"}
    judges = judge_intervals(measures)
    fell = [judge for judge, (_, high) in judges.items() if high < 0 < least_score_gain(measures)]
    if fell:
        yield _doubt("exploits", judge=" and ".join(fell), **values)
    elif is_score_alone(measures):
        yield _doubt("unmoved", judge=next(iter(judges)), **values)
    before, after = measures.get("response_tokens_before"), measures.get("response_tokens_after")
    if before and after is not None and not 1 / LENGTH_FACTOR <= after / before <= LENGTH_FACTOR:
        yield _doubt("length", phase=phase, before=before, after=after)
    ended = measures.get("ended_share_after")
    if ended is not None and ended < FEW_ENDED:
        or_penalty = " or ppo.missing_end_penalty" if phase == "ppo" else ""
        yield _doubt("few_ended", phase=phase, ended=ended, or_penalty=or_penalty)
    kl = measures.get("kl_to_reference")
    if phase == "dpo" and kl is not None and kl < MOST_KL_UNMOVED:
        yield _doubt("dpo_stayed", phase=phase, kl=kl)
    has_mastered = "return_after" in measures and least_score_gain(measures) > 0  # of a game
    if kl is not None and after and kl / after > MOST_KL and not has_mastered:
        yield _doubt("kl", kl=kl / after, most=MOST_KL, **values)


def _gain_doubts(ppo: Mapping[str, Any], series: PointsByMetric) -> Iterator[Doubt]:
    """Yield a doubt with the likely cause if PPO changed nothing that can be measured.

    No doubt is yielded for a policy far from its reference, which has a doubt already.
    """
    gain = read_gain({"ppo": ppo})
    if gain is None or not gain.is_unmeasured or "score_before" not in ppo:
        return
    kl: float = ppo["kl_to_reference"]
    if kl / (ppo.get("response_tokens_after") or math.inf) > MOST_KL:
        return
    clipped = mean_of([share for _, share in series.get("ppo/clipfrac", ())])
    kl_ctl = next((value for _, value in reversed(series.get("ppo/kl_ctl", ()))), 0.0)
    score_gain = ppo["score_after"] - ppo["score_before"]
    if kl < MOST_KL_UNMOVED and clipped < MOST_CLIPPED_UNMOVED:
        yield _doubt("stayed", kl=kl, clipped=clipped)
    elif kl < MOST_KL_UNMOVED or kl_ctl * kl > max(score_gain, 0.0):
        yield _doubt("held_back", kl=kl, kl_ctl=kl_ctl, gain=score_gain)
    else:
        yield _doubt("unmeasured", kl=kl)


def _reward_doubts(series: PointsByMetric, *, has_risen: bool) -> Iterator[Doubt]:
    """Yield a doubt if many rewards failed, and one if scores were equal in most steps or groups.

    No line is yielded for scores that differed at the first step, rose, and then became equal.
    """
    failed = mean_of([share for _, share in series.get("ppo/fallback_share", ())])
    if failed > MOST_FALLBACKS:
        yield _doubt("failed", failed=failed)
    shares_by_doubt = {
        "equal_scores": _equal_score_flags(series, "ppo/score"),
        "equal_clipped": _equal_score_flags(series, "ppo/clipped_score"),
        "equal_groups": [share for _, share in series.get("ppo/equal_group_share", ())],
    }
    for name, shares in shares_by_doubt.items():
        share, has_converged = mean_of(shares), has_risen and min(shares[:1], default=1.0) < 1
        if share > MOST_WITHOUT_SIGNAL and not has_converged:
            yield _doubt(name, count=sum(shares), steps=len(shares), share=share)
            return


def _equal_score_flags(series: PointsByMetric, name: str) -> list[float]:
    """Return for each step 1 if the score ``name`` was equal for all responses, otherwise 0."""
    means, deviations = (series.get(f"{name}_{part}", ()) for part in ("mean", "std"))
    return [
        float(deviation <= ROUNDING * max(1.0, abs(mean)))
        for (_, mean), (_, deviation) in zip(means, deviations, strict=False)
    ]
