"""Choose the measure by which a run's success is judged, and return how training changed it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from rlhf.config.choices import Phase

# Measures of an answer, the best judge first: names in result.json, and names for readers. After
# the gold score come the run's own judges: rewards of weight 0, which PPO does not see.
JUDGES = {"exact": "exactly right", "gold": "gold score"}
TRAINED_ON = "score"  # the last choice: what PPO itself maximises
SHARES = ("exact",)  # judges whose mean is a share of all answers


class Gain(NamedTuple):
    """The change by the last phase with a judge; ``interval`` is the 95 % interval over prompts.

    ``interval`` is None, or its ends are NaN, if it is unknown; if all prompts changed alike, its
    ends are equal.
    """

    key: str
    judge: str
    before: float
    after: float
    interval: Sequence[float] | None
    score: tuple[float, float] | None = None
    """The score before and after, if it has risen measurably and no judge has; otherwise None."""

    @property
    def word(self) -> str:
        """Return the direction of the gain, or why the interval shows no direction."""
        low, high = self.interval or (math.inf, math.inf)
        if low == high:  # without a spread over prompts, the mean has no interval
            return "no change at any prompt" if low == 0 else "no interval"
        if low <= 0 <= high or not math.isfinite(high - low):
            return "no measurable change"
        up, down = ("higher", "lower") if self.key == TRAINED_ON else ("better", "worse")
        return up if low > 0 else down

    @property
    def is_proven(self) -> bool:
        """Return True if the interval is above 0."""
        return self.word in {"better", "higher"}

    @property
    def ends(self) -> tuple[str, str]:
        """Return the values before and after as texts."""
        form = "{:.1%}" if self.key in SHARES else "{:.3f}"
        return form.format(self.before), form.format(self.after)

    @property
    def text(self) -> str:
        """Return what was gained, in words, without the interval."""
        ends = " → ".join(self.ends)
        if self.score is None:
            return f"{self.word}: {self.judge} {ends}"
        mark, done = (":", "fell") if self.word == "worse" else ("?", "did not")
        risen = "the score rose from {:.3f} to {:.3f}".format(*self.score)
        return f"over-optimised{mark} {risen}, {self.judge} {done}: {ends}"

    @property
    def interval_text(self) -> str:
        """Return the interval as text; "" if there is none."""
        if self.interval is None or self.interval[0] == self.interval[1]:
            return ""
        if self.key in SHARES:
            return "{:+.1f} to {:+.1f} points".format(*(100 * end for end in self.interval))
        return "{:+.3f} to {:+.3f}".format(*self.interval)


def read_gain(phases: Mapping[str, Mapping[str, Any]]) -> Gain | None:
    """Return what the last phase with a judge changed, by its best judge; None without a judge."""
    for found in (phases[phase] for phase in reversed(Phase) if phase in phases):
        judges = {key: f"judge {key}" for key in found.get("judge_gains", {})}
        named = JUDGES | judges | {TRAINED_ON: "score, by the reward that PPO maximises"}
        for key, judge in named.items():
            if key in judges or f"{key}_before" in found:
                interval = judge_intervals(found).get(judge, found.get(f"{key}_gain_ci"))
                score = _values(found, TRAINED_ON) if is_score_alone(found) else None
                return Gain(key, judge, *_values(found, key), interval, score)
    return None


def judge_intervals(found: Mapping[str, Any]) -> dict[str, Sequence[float]]:
    """Return the known intervals of the gains of a phase by judge, the best judge first."""
    named = {judge: found.get(f"{key}_gain_ci") for key, judge in JUDGES.items()}
    named |= {f"judge {key}": each for key, each in found.get("judge_gains", {}).items()}
    return {judge: each for judge, each in named.items() if each and None not in each}


def is_score_alone(found: Mapping[str, Any]) -> bool:
    """Return True if the score has risen measurably, and there are judges but none has risen."""
    lows = [low for low, _ in judge_intervals(found).values()]
    return bool(lows) and max(lows) <= 0 < least_score_gain(found)


def least_score_gain(found: Mapping[str, Any]) -> float:
    """Return the lower end of the score gain's 95 % interval; 0 if it was not measured."""
    return float(found.get(f"{TRAINED_ON}_gain_ci", (0.0,))[0] or 0.0)


def _values(found: Mapping[str, Any], key: str) -> tuple[float, float]:
    """Return a measure before and after; the run's own judges are parts of the score."""
    parts = (found.get(f"{TRAINED_ON}_parts_{when}", {}) for when in ("before", "after"))
    before, after = (each.get(key, math.nan) for each in parts)
    return found.get(f"{key}_before", before), found.get(f"{key}_after", after)
