"""Choose the measure from which a run's success is read, and return what training changed in it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from rlhf.config.choices import Phase

# Measures of an answer, the best judge first: names in result.json, and names for readers. Behind
# the gold score follow the judges of the run's own: rewards of weight 0, which PPO does not see.
JUDGES = {"exact": "exactly right", "gold": "gold score"}
TRAINED_ON = "score"  # the last choice: what PPO itself maximises
SHARES = ("exact",)  # judges whose mean is a share of all answers


class Gain(NamedTuple):
    """What the last phase with a judge changed; ``interval`` is of the gain, at 95 % over prompts.

    ``interval`` is None, or its ends are NaN or None, if it is unknown.
    """

    key: str
    judge: str
    before: float
    after: float
    interval: Sequence[Any] | None

    @property
    def word(self) -> str:
        """Return what the interval tells: a direction, no measurable change, or "" if unknown."""
        if self.interval is None:
            return ""
        low, high = self.interval
        if low <= 0 <= high or not math.isfinite(high - low):
            return "no measurable change"
        up, down = ("higher", "lower") if self.key == TRAINED_ON else ("better", "worse")
        return up if low > 0 else down

    @property
    def is_proven(self) -> bool:
        """Return True unless the interval is known and not above 0."""
        return self.word in {"", "better", "higher"}

    @property
    def ends(self) -> tuple[str, str]:
        """Return the values before and after as texts."""
        form = "{:.1%}" if self.key in SHARES else "{:.3f}"
        return form.format(self.before), form.format(self.after)

    @property
    def text(self) -> str:
        """Return what was gained, in words, without the interval."""
        return f"{self.word}: {self.judge} {' → '.join(self.ends)}".removeprefix(": ")

    @property
    def interval_text(self) -> str:
        """Return the interval as text; "" if it is unknown."""
        if self.interval is None:
            return ""
        if self.key in SHARES:
            return "{:+.1f} to {:+.1f} points".format(*(100 * end for end in self.interval))
        return "{:+.3f} to {:+.3f}".format(*self.interval)


def read_gain(phases: Mapping[str, Mapping[str, Any]]) -> Gain | None:
    """Return what the last phase with a judge changed, by its best judge; None without a judge."""
    for found in (phases[phase] for phase in reversed(Phase) if phase in phases):
        for key, judge in JUDGES.items():
            if f"{key}_before" in found:
                return _gain(found, key, judge)
        for key, interval in found.get("judge_gains", {}).items():
            before, after = (
                found.get(f"score_parts_{when}", {}).get(key, math.nan)
                for when in ("before", "after")
            )
            return Gain(key, f"judge {key}", before, after, interval)
        if f"{TRAINED_ON}_before" in found:
            return _gain(found, TRAINED_ON, "score, by the reward that PPO maximises")
    return None


def _gain(found: Mapping[str, Any], key: str, judge: str) -> Gain:
    before, after = (found.get(f"{key}_{when}", math.nan) for when in ("before", "after"))
    return Gain(key, judge, before, after, found.get(f"{key}_gain_ci"))
