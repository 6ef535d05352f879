"""Test whether settings differ, over seeds, and count how many comparisons are made.

Two settings with two or more common seeds are compared by the differences between their runs with
the same seed, otherwise by Welch's t-test (https://doi.org/10.1093/biomet/34.1-2.28). A difference
is reported only if its 95 % interval excludes 0 and Holm's correction for all differences of the
comparison keeps it (https://www.jstor.org/stable/4615733). It is never reported from fewer than
three seeds: Student's interval of two seeds is 12.7 standard errors to each side. Seeds without any
spread give no interval, and so no verdict.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from rlhf.base.intervals import (
    LEVEL,
    Estimate,
    mean_of,
    mean_with_interval,
    t_quantile,
    two_sided_probability,
)
from rlhf.report.comparison import FEWEST_SEEDS, SEEDS_IN_WORDS, Setting

TINY = 1e-9  # half-width of an interval, relative to the mean, that is only rounding
UNCOMPARED = ("minutes",)  # depends on the machine's other load
OF_EARLIER_PHASES = ("accuracy", "perplexity")  # which PPO and DPO do not change

SettingMeasure = tuple[int, str]  # the number of a setting, and the title of a measure


class Difference(NamedTuple):
    """The difference of a measure between a setting and the reference setting."""

    estimate: Estimate  # its half-width is NaN if no interval can be given
    fewest_seeds: int  # the smaller number of seeds of the two settings
    freedom: float = math.nan  # degrees of freedom of the interval

    @property
    def verdict(self) -> str:
        """Return "higher", "lower", "-" (not significant), "one seed", "two seeds", "no spread"."""
        if math.isnan(self.estimate.half):
            return SEEDS_IN_WORDS.get(self.fewest_seeds, "no spread")
        if not self.estimate.excludes_zero:
            return "-"
        return "higher" if self.estimate.mean > 0 else "lower"

    @property
    def probability(self) -> float:
        """Return how likely equal settings differ as much; NaN without an interval."""
        return two_sided_probability(self.estimate, self.freedom)


class SettingsComparison(NamedTuple):
    """All settings compared with the first that has finished runs, the reference."""

    reference: Setting | None
    titles: Sequence[str]  # measures to show
    differences: Mapping[SettingMeasure, Difference]
    kept: frozenset[SettingMeasure]  # differences that are significant after the correction
    left_out: Mapping[str, str]  # why a measure is not compared, by title

    @property
    def tests(self) -> int:
        """Return how many differences were tested."""
        return sum(not math.isnan(found.probability) for found in self.differences.values())

    def verdict(self, setting: int, title: str) -> str:
        """Return the verdict on a measure of a setting after the correction; "" if not compared."""
        if (found := self.differences.get((setting, title))) is None:
            return ""
        is_told = found.verdict in {"higher", "lower"}
        return "-" if is_told and (setting, title) not in self.kept else found.verdict


def compare_with_first(settings: Sequence[Setting]) -> SettingsComparison:
    """Compare the settings with the first that has finished runs, in each measure of one meaning.

    Measures that all settings share, or that repeat another measure, are not shown.
    """
    numbers = [number for number, setting in enumerate(settings) if setting.finished_runs()]
    if not numbers:
        return SettingsComparison(None, [], {}, frozenset(), {})
    first, others = settings[numbers[0]], numbers[1:]
    every = dict.fromkeys(title for n in numbers for title in settings[n].estimates())
    titles = [title for title in every if not _carries_nothing(title, every, settings)]
    found: dict[SettingMeasure, Difference] = {}
    left_out: dict[str, str] = {}
    for number in others:
        for title in titles:
            both_have = all(title in each.estimates() for each in (first, settings[number]))
            if title in UNCOMPARED or not both_have:
                continue
            if (reason := _difference_of_meaning(first, settings[number], title)) is not None:
                left_out.setdefault(title, reason)
            else:
                found[number, title] = difference(first, settings[number], title)
    probabilities = {place: each.probability for place, each in found.items()}
    return SettingsComparison(first, titles, found, keep_by_holm(probabilities), left_out)


def keep_by_holm(probabilities: Mapping[SettingMeasure, float]) -> frozenset[SettingMeasure]:
    """Return the keys whose difference stays significant if all of them are tested at once."""
    tested = {place: p for place, p in probabilities.items() if not math.isnan(p)}
    kept = set()
    for number, place in enumerate(sorted(tested, key=tested.__getitem__)):
        if tested[place] > (1 - LEVEL) / (len(tested) - number):
            break
        kept.add(place)
    return frozenset(kept)


def difference(first: Setting, other: Setting, title: str) -> Difference:
    """Return the difference, ``other`` minus ``first``, of the measure ``title``."""
    ours = {run.seed: run.measures[title] for run in first.finished_runs()}
    theirs = {run.seed: run.measures[title] for run in other.finished_runs()}
    common = sorted(ours.keys() & theirs.keys())
    if len(common) > 1 or ours.keys() == theirs.keys():
        paired = mean_with_interval([theirs[s] - ours[s] for s in common])
        found = Difference(paired, len(common), len(common) - 1)
    else:
        found = _welch(list(ours.values()), list(theirs.values()))
    estimate = found.estimate
    has_spread = estimate.half > TINY * abs(estimate.mean) or not estimate.mean
    if found.fewest_seeds >= FEWEST_SEEDS and has_spread:
        return found
    return found._replace(estimate=estimate._replace(half=math.nan))


def _welch(first: Sequence[float], other: Sequence[float]) -> Difference:
    """Return the difference of the means of two independent samples, with its 95 % interval.

    The degrees of freedom follow Welch and Satterthwaite; they are not rounded.
    """
    mean, size = mean_of(other) - mean_of(first), len(first) + len(other)
    fewest = min(len(first), len(other))
    if fewest == 1 or not math.isfinite(mean):
        return Difference(Estimate(mean, math.nan, size), fewest)
    parts = [statistics.variance(each) / len(each) for each in (first, other)]
    if not sum(parts):
        return Difference(Estimate(mean, 0.0, size), fewest, size - 2)
    terms = [p * p / (len(e) - 1) for p, e in zip(parts, (first, other), strict=True)]
    freedom = sum(parts) ** 2 / sum(terms)
    half = t_quantile(freedom) * math.sqrt(sum(parts))
    return Difference(Estimate(mean, half, size), fewest, freedom)


def _carries_nothing(title: str, titles: Mapping[str, None], settings: Sequence[Setting]) -> bool:
    """Return True for the objective that repeats the gold score, and for results that are shared.

    Settings of PPO share the accuracy and the perplexity of earlier phases: runs with one seed have
    one value.
    """
    if title == "objective" and "gold" in titles:
        return True
    values: dict[int, set[float]] = {}
    for run in (run for setting in settings for run in setting.finished_runs()):
        if title in run.measures:
            values.setdefault(run.seed, set()).add(run.measures[title])
    return title in OF_EARLIER_PHASES and all(len(each) == 1 for each in values.values())


def _difference_of_meaning(first: Setting, other: Setting, title: str) -> str | None:
    """Return the two meanings of a measure if they differ between runs that are compared.

    Runs with the same seed are compared with each other, runs with other seeds all with all.
    """
    ours = {run.seed: run.meanings.get(title, "") for run in first.finished_runs()}
    theirs = {run.seed: run.meanings.get(title, "") for run in other.finished_runs()}
    common = ours.keys() & theirs.keys()
    if len(common) > 1 or ours.keys() == theirs.keys():
        pairs = [(ours[seed], theirs[seed]) for seed in sorted(common)]
    else:
        pairs = [(one, two) for one in ours.values() for two in theirs.values()]
    return next((f"{one}; {two}" for one, two in pairs if one != two), None)
