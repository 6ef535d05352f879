"""Alarms during training: rules on the metrics of the steps so far.

A rule is a condition on the metrics of a phase that shows that something is wrong. If it holds for
``patience`` steps in a row, an alarm is raised, once per run. docs/troubleshooting.md has a remedy
for each alarm, and docs/results.md how often alarms are right.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rlhf.base.intervals import mean_of
from rlhf.base.packaged_yaml import read_yaml_beside
from rlhf.base.stored_files import ALARMS
from rlhf.config.schema.run import AlarmName

BASE_STEPS = 5  # steps at the start that later steps are compared with
MOST_KL_AT_START = 0.01  # nats per sequence; with equal weights it is 0 on one rank
LEAST_CHANGE = 1e-3  # nats per sequence; a smaller KL is no change: bf16 rounding gives 3e-4
LEAST_EXPLAINED = 0.03  # share of the returns' variance that a useful critic explains
LEAST_SAMPLES = 0.3  # effective sample size of a rollout, as a share of its tokens
MORE_DUPLICATES = 0.3  # allowed rise of the share of the same response since the start
LEAST_ENTROPY = 0.05  # least share of the mean entropy of the first BASE_STEPS steps
MOST_EQUAL_GROUPS = 0.9  # share of groups whose responses have equal scores
EQUAL_STD = 1e-6  # scores of a smaller deviation are equal; times their mean if that is above 1
SCORE_RISE = 0.25  # scores have risen if they grew by so many standard deviations of the start
LEAST_MOVE = 0.01  # nats per sequence; a policy with a larger KL has moved from its reference
GOLD_FALL = 0.04  # fall of the mean gold score (0 to 1) that is allowed while the score rises
GOLD_WINDOW = 3  # evaluations that are averaged
SCORE_WINDOW = 3  # steps that are averaged

ValuesByMetric = Mapping[str, Sequence[float]]  # values of each metric so far, the latest last
Condition = Callable[[Sequence[float], ValuesByMetric], bool]


class Alarm(NamedTuple):
    """An alarm that a rule raised: step, metric, and advice on the likely cause and fix."""

    phase: str
    step: int
    name: AlarmName
    metric: str
    value: float
    advice: str

    @property
    def line(self) -> str:
        """Return the alarm as one line."""
        return (
            f"alarm {self.name}: {self.metric}={self.value:.4g} at {self.phase} step {self.step}. "
            f"{self.advice}"
        )


def read_alarms(run_dir: Path) -> list[Alarm]:
    """Return the alarms that a run has raised so far."""
    return [parse_alarm(line) for line in ALARMS.read_lines(run_dir)]


def parse_alarm(line: Mapping[str, Any]) -> Alarm:
    """Return the alarm in a line of alarms.jsonl."""
    alarm = Alarm(**{name: line[name] for name in Alarm._fields})
    return alarm._replace(value=math.nan) if line["value"] is None else alarm  # JSON has no NaN


def first_divergence(alarms: Iterable[Alarm]) -> Alarm | None:
    """Return the first of ``alarms`` with the name not_finite, or None."""
    return next((alarm for alarm in alarms if alarm.name == AlarmName.not_finite), None)


def describe_divergence(alarms: Iterable[Alarm]) -> str | None:
    """Return "NaN since ..." for a run that has raised not_finite, otherwise None."""
    if (divergence := first_divergence(alarms)) is None:
        return None
    return f"NaN since {divergence.phase.upper()} step {divergence.step} ({divergence.metric})"


class Rule(NamedTuple):
    """An entry of alarms.yaml: an alarm after ``patience`` wrong values of ``metric`` in a row."""

    metric: str
    patience: int
    advice: str
    above: float | None = None  # the limit of ``metric``; None: CONDITIONS has a condition
    above_in_fp32: float | None = None  # the limit in an fp32 run; None: the same


def _mean_at_start(values: Sequence[float]) -> float:
    return mean_of(values[:BASE_STEPS])


def _start_condition(is_wrong: Callable[[float, float], bool]) -> Condition:
    """Build a condition on the latest value and the mean of the first BASE_STEPS values."""
    return lambda all_, _: len(all_) > BASE_STEPS and is_wrong(all_[-1], _mean_at_start(all_))


def _is_gold_falling(gold: Sequence[float], series: ValuesByMetric) -> bool:
    """Return True if the gold score has fallen since its best value while the score has risen.

    Means of a few evaluations in a row are compared: a single evaluation is too noisy.
    """
    golds, scores = _running_means(gold), _running_means(series["ppo/eval_score"])
    if not golds or len(golds) != len(scores):
        return False
    best = max(golds)
    return golds[-1] < best - GOLD_FALL and scores[-1] > scores[golds.index(best)]


def _running_means(values: Sequence[float]) -> list[float]:
    ends = range(GOLD_WINDOW, len(values) + 1)
    return [mean_of(values[end - GOLD_WINDOW : end]) for end in ends]


def _has_equal_scores(name: str, series: ValuesByMetric) -> bool:
    """Return True if scores were equal in the latest step; ``name`` is ppo/score, for example."""
    if not series[f"{name}_std"]:  # an older version did not log the metric
        return False
    return series[f"{name}_std"][-1] <= EQUAL_STD * max(1.0, abs(series[f"{name}_mean"][-1]))


def _has_score_risen(series: ValuesByMetric) -> bool:
    """Return True if scores rose since the start: equal scores may then all be the best."""
    scores = series["ppo/score_mean"]
    margin = max(SCORE_RISE * _mean_at_start(series["ppo/score_std"]), EQUAL_STD)
    return mean_of(scores[-SCORE_WINDOW:]) > _mean_at_start(scores) + margin


def _has_moved_without_rewards(series: ValuesByMetric) -> bool:
    """Return True if the policy has moved although no reward distinguishes its responses."""
    kl = series["ppo/kl_to_reference_k3"]
    return _has_equal_scores("ppo/clipped_score", series) and max(kl[-1:], default=0.0) > LEAST_MOVE


# A condition takes the values of its alarm's metric, and the values of all metrics. It returns True
# if the latest are wrong; after ``patience`` such steps in a row the alarm is raised.
CONDITIONS: Mapping[AlarmName, Condition] = {
    AlarmName.reference_mismatch: lambda kl, _: len(kl) == 1 and kl[0] > MOST_KL_AT_START,
    AlarmName.no_change: lambda kl, series: (  # only steps that train the actor log this rate
        len(series["ppo/actor_learning_rate"]) > 2 * BASE_STEPS
        and max(map(abs, kl[-BASE_STEPS:])) < LEAST_CHANGE
    ),
    AlarmName.few_samples: lambda sizes, _: sizes[-1] < LEAST_SAMPLES,
    AlarmName.entropy_collapse: _start_condition(lambda last, start: last < LEAST_ENTROPY * start),
    AlarmName.length: _start_condition(
        lambda last, start: not 1 / 4 < last / max(start, 1.0) < 2  # noqa: PLR2004
    ),
    AlarmName.few_end: _start_condition(lambda last, start: last < start / 2),
    AlarmName.duplicates: _start_condition(lambda last, start: last > start + MORE_DUPLICATES),
    AlarmName.critic_useless: lambda explained, series: (
        len(explained) > 2 * BASE_STEPS
        and explained[-1] < LEAST_EXPLAINED
        # Equal returns have no variance that the critic could explain.
        and not _has_equal_scores("ppo/clipped_score", series)
    ),
    AlarmName.score_against_gold: _is_gold_falling,
    AlarmName.equal_scores: lambda _, series: (
        _has_equal_scores("ppo/score", series) and not _has_score_risen(series)
    ),
    AlarmName.equal_groups: lambda share, series: (
        share[-1] > MOST_EQUAL_GROUPS and not _has_score_risen(series)
    ),
    AlarmName.blind_updates: lambda _, series: (
        _has_moved_without_rewards(series) and not _has_score_risen(series)
    ),
}
RULES = {
    AlarmName(name): Rule(**entry)
    for name, entry in read_yaml_beside(__file__, "alarms.yaml").items()
}
NEEDED = {rule.metric for rule in RULES.values()}
NEEDED |= {"ppo/eval_score", "ppo/actor_learning_rate", "ppo/score_mean", "ppo/clipped_score_mean"}
MOST_SKIPPED = 20  # skipped steps in a row without an alarm; fp16's loss scale settles in fewer
NOT_FINITE_ADVICE = "A metric is not a number: lower the learning rate, or use hardware.dtype=fp32."


class AlarmRules:
    """A checker of the alarms' rules, which keeps the metrics of the steps so far.

    ``muted`` alarms are never raised. ``is_fp32``: rollouts and training both compute in fp32.
    """

    def __init__(self, muted: Collection[AlarmName] = (), *, is_fp32: bool = False) -> None:
        self._muted = muted
        self._is_fp32 = is_fp32
        # Arrays take 8 bytes per step, and only metrics that rules read are kept: runs are long.
        self._series = {name: array("d") for name in NEEDED}
        self._wrong_steps: dict[AlarmName, int] = {}  # in a row, up to the latest step
        self._raised: set[AlarmName] = set()
        self._skipped = 0  # steps in a row with a skipped update

    def check(self, phase: str, step: int, values: Mapping[str, float]) -> list[Alarm]:
        """Add the metrics of a step; return the alarms that it raises."""
        alarms = []
        self._skipped = self._skipped + 1 if values.get(f"{phase}/skipped_steps") else 0
        for name, value in values.items():
            if name in self._series:
                self._series[name].append(value)
            # A skipped update, as after an overflow in fp16, has changed no weight.
            is_harmless = name.endswith("grad_norm") and 0 < self._skipped <= MOST_SKIPPED
            if not math.isfinite(value) and name.startswith(phase) and not is_harmless:
                alarm = Alarm(phase, step, AlarmName.not_finite, name, value, NOT_FINITE_ADVICE)
                alarms += self._raise_once(alarm)
        for name, rule in RULES.items():
            if rule.metric not in values or not math.isfinite(values[rule.metric]):
                continue
            series = self._series[rule.metric]
            limit = (self._is_fp32 and rule.above_in_fp32) or rule.above
            is_wrong = (
                CONDITIONS[name](series, self._series) if limit is None else series[-1] > limit
            )
            self._wrong_steps[name] = self._wrong_steps.get(name, 0) + 1 if is_wrong else 0
            if self._wrong_steps[name] >= rule.patience:
                value = values[rule.metric]
                alarm = Alarm(phase, step, name, rule.metric, value, rule.advice)
                alarms += self._raise_once(alarm)
        return alarms

    def _raise_once(self, alarm: Alarm) -> list[Alarm]:
        if alarm.name in self._raised or alarm.name in self._muted:
            return []
        self._raised.add(alarm.name)
        return [alarm]
