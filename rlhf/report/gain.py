"""Choose the measure by which a run's success is judged, and return how training changed it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from rlhf.config.choices import Phase

# Judges of answers, the best first: name in result.json -> name for readers. After the gold score
# come judges that the run defines: parts of rewards with weight 0, which PPO does not see.
JUDGES = {"exact": "exactly right", "gold": "gold score"}
TRAINED_ON = "score"  # what PPO itself maximises, used only without a judge
SHARES = ("exact",)  # judges whose mean is a share of the answers


class Gain(NamedTuple):
    """The change of a judge's value by the last phase with a judge, and its 95 % interval.

    The interval is over prompts. It is None, or its ends are NaN, if it is unknown; its ends are
    equal if all prompts changed alike.
    """

    key: str
    judge: str
    before: float
    after: float
    interval: Sequence[float] | None
    score: tuple[float, float] | None = None
    """The score before and after if it has risen measurably while no judge has; otherwise None."""

    @property
    def word(self) -> str:
        """Return the direction of the gain, or why the interval shows no direction."""
        low, high = self.interval or (math.inf, math.inf)
        if low == high:  # without a spread over prompts, the mean has no interval
            return "no change for any prompt" if low == 0 else "no interval"
        if low <= 0 <= high or not math.isfinite(high - low):
            return "no measurable change"
        up, down = ("higher", "lower") if self.key == TRAINED_ON else ("better", "worse")
        return up if low > 0 else down

    @property
    def is_proven(self) -> bool:
        """Return True if the interval is above 0."""
        return self.word in {"better", "higher"}

    @property
    def is_unmeasured(self) -> bool:
        """Return True if the interval shows no change, and the score did not rise instead."""
        unmoved = ("no measurable change", "no change for any prompt")
        return self.word in unmoved and self.score is None

    @property
    def value_texts(self) -> tuple[str, str]:
        """Return the values before and after as texts."""
        form = "{:.1%}" if self.key in SHARES else "{:.3f}"
        return form.format(self.before), form.format(self.after)

    @property
    def text(self) -> str:
        """Return the gain in words, without the interval."""
        values = " → ".join(self.value_texts)
        if self.score is None:
            return f"{self.word}: {self.judge} {values}"
        mark, verb = (":", "fell") if self.word == "worse" else ("?", "did not")
        risen = "the score rose from {:.3f} to {:.3f}".format(*self.score)
        return f"over-optimised{mark} {risen}, {self.judge} {verb}: {values}"

    @property
    def interval_text(self) -> str:
        """Return the interval as text; "" if there is none."""
        if self.interval is None or self.interval[0] == self.interval[1]:
            return ""
        if self.key in SHARES:
            return "{:+.1f} to {:+.1f} points".format(*(100 * end for end in self.interval))
        return "{:+.3f} to {:+.3f}".format(*self.interval)


def read_gain(phases: Mapping[str, Mapping[str, Any]]) -> Gain | None:
    """Return the gain of the last phase with a judge, by its best judge; None without a judge."""
    for measures in (phases[phase] for phase in reversed(Phase) if phase in phases):
        own_judges = {key: f"judge {key}" for key in measures.get("judge_gains", {})}
        names = JUDGES | own_judges | {TRAINED_ON: "score, by the reward that PPO maximises"}
        for key, judge in names.items():
            if key in own_judges or f"{key}_before" in measures:
                interval = judge_intervals(measures).get(judge, measures.get(f"{key}_gain_ci"))
                score = values_around(measures, TRAINED_ON) if is_score_alone(measures) else None
                return Gain(key, judge, *values_around(measures, key), interval, score)
    return None


def judge_intervals(measures: Mapping[str, Any]) -> dict[str, Sequence[float]]:
    """Return the known intervals of a phase's gains by judge, the best judge first."""
    by_judge = {judge: measures.get(f"{key}_gain_ci") for key, judge in JUDGES.items()}
    by_judge |= {f"judge {key}": ends for key, ends in measures.get("judge_gains", {}).items()}
    return {judge: ends for judge, ends in by_judge.items() if ends and None not in ends}


def is_score_alone(measures: Mapping[str, Any]) -> bool:
    """Return True if the score has risen measurably, and there are judges but none has risen."""
    lows = [low for low, _ in judge_intervals(measures).values()]
    return bool(lows) and max(lows) <= 0 < least_score_gain(measures)


def least_score_gain(measures: Mapping[str, Any]) -> float:
    """Return the lower end of the score gain's 95 % interval; 0 if it was not measured."""
    return float(measures.get(f"{TRAINED_ON}_gain_ci", (0.0,))[0] or 0.0)


def values_around(measures: Mapping[str, Any], key: str) -> tuple[float, float]:
    """Return a measure before and after a phase; for the run's own judges, their parts of score."""
    parts = (measures.get(f"{TRAINED_ON}_parts_{when}", {}) for when in ("before", "after"))
    before, after = (values.get(key, math.nan) for values in parts)
    return measures.get(f"{key}_before", before), measures.get(f"{key}_after", after)
