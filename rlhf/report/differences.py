"""Test over seeds whether settings differ, corrected for all settings that were tried.

Two settings with two or more common seeds are compared by the differences between their runs with
the same seed, otherwise by Welch's t-test (https://doi.org/10.1093/biomet/34.1-2.28). A difference
is reported only if its 95 % interval excludes 0, also after Holm's correction over all settings
that were tried (https://www.jstor.org/stable/4615733). It is never reported from fewer than three
seeds: Student's interval of two seeds is 12.7 standard errors to each side. Seeds without any
spread give no interval, and so no verdict.

Held-out prompts are not independent repetitions of training (https://arxiv.org/abs/2504.07086):
they show how much of the spread over seeds is noise of prompts; no interval is computed over them.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from itertools import product
from statistics import NormalDist
from typing import Any, NamedTuple

from rlhf.base.intervals import CONFIDENCE, Estimate, mean_of, t_quantile, two_sided_p_value
from rlhf.report.comparison import FEWEST_SEEDS, MEASURES, ComparedRun, Setting, Tried

SEEDS_IN_WORDS = {1: "one seed", 2: "two seeds"}
TINY = 1e-9  # a half-width below this share of the mean is only rounding error
UNCOMPARED = ("minutes",)  # measures that depend on the machine's other load
UNCLEAR = "unclear"  # the text that readers see for the verdict "-"
NOT_COMPARED = "not compared"
OF_EARLIER_PHASES = ("accuracy", "perplexity")  # measures of phases before PPO
VALUES_BY_PROMPT = {measure.title: measure.of_prompts for measure in MEASURES if measure.of_prompts}
POWER = 0.8  # probability with which the advised number of seeds detects a difference
MOST_SEEDS = 100  # a larger number of seeds is shown as ">100"

SettingMeasure = tuple[int, str]  # the number of a setting, and the title of a measure
RunPair = tuple[ComparedRun, ComparedRun]  # runs of two settings with the same seed


class Difference(NamedTuple):
    """The difference of a measure between a setting and the baseline."""

    estimate: Estimate  # its half-width is NaN if no interval can be given
    fewest_seeds: int  # the smaller number of seeds of the two settings
    freedom: float = math.nan  # degrees of freedom of the interval
    prompt_share: float | None = None
    """Share of the variance over seeds that single prompts explain; None if it is unknown."""

    @property
    def verdict(self) -> str:
        """Return "higher", "lower", "-" (not significant), "one seed", "two seeds", "no spread"."""
        if math.isnan(self.estimate.half):
            return SEEDS_IN_WORDS.get(self.fewest_seeds, "no spread")
        if not self.estimate.excludes_zero:
            return "-"
        return "higher" if self.estimate.mean > 0 else "lower"

    @property
    def p_value(self) -> float:
        """Return the p-value of the difference; NaN without an interval."""
        return two_sided_p_value(self.estimate, self.freedom)


class SettingsComparison(NamedTuple):
    """All settings compared with the first that has finished runs, the baseline."""

    baseline: Setting | None
    titles: Sequence[str]  # measures to show
    differences: Mapping[SettingMeasure, Difference]
    significant: frozenset[SettingMeasure]  # keys of differences that pass the correction
    left_out: Mapping[str, str]  # why a measure is not compared, by title
    tried: Tried
    num_tests: int  # differences between settings tried, shown or not, that the correction counts

    def verdict(self, setting: int, title: str) -> str:
        """Return the verdict on a measure after Holm's correction; "" if it is not compared."""
        if (difference := self.differences.get((setting, title))) is None:
            return ""
        has_direction = difference.verdict in {"higher", "lower"}
        is_dropped = has_direction and (setting, title) not in self.significant
        return "-" if is_dropped else difference.verdict

    def more_seeds(self, setting: int, title: str) -> int | str | None:
        """Return how many more seeds of each setting may detect a difference, as ">100" if many.

        Return "unknown" without an interval, and None if the difference is detected already or the
        measure is not compared.
        """
        if self.verdict(setting, title) in {"", "higher", "lower"}:
            return None
        difference = self.differences[setting, title]
        if math.isnan(difference.p_value):
            return "unknown"
        count = count_more_seeds(difference, (1 - CONFIDENCE) / self.num_tests)
        return f">{MOST_SEEDS}" if count > MOST_SEEDS else count

    def verdict_text(self, setting: int, title: str) -> str:
        """Return the verdict for readers, with "(+N)" if N more seeds may detect a difference."""
        verdict, more = self.verdict(setting, title), self.more_seeds(setting, title)
        text = UNCLEAR if verdict == "-" else verdict or NOT_COMPARED * (title in self.left_out)
        return text if more in {None, "unknown"} else f"{text} (+{more})"


def compare_with_first(
    settings: Sequence[Setting], tried: Tried | None = None
) -> SettingsComparison:
    """Compare the settings with the first that has finished runs, in measures of equal meaning.

    A measure that repeats another, or has the same values in all settings, is not shown. Without
    ``tried``, no settings except ``settings`` count as tried.
    """
    tried = tried or Tried(len(settings))
    numbers = [number for number, setting in enumerate(settings) if setting.finished_runs()]
    if not numbers:
        return SettingsComparison(None, [], {}, frozenset(), {}, tried, 0)
    first, others = settings[numbers[0]], numbers[1:]
    measured = dict.fromkeys(title for n in numbers for title in settings[n].estimates())
    titles = [title for title in measured if not _is_redundant(title, measured, settings)]
    differences: dict[SettingMeasure, Difference] = {}
    left_out: dict[str, str] = {}
    for number, title in product(others, titles):
        both_have = all(title in s.estimates() for s in (first, settings[number]))
        if title in UNCOMPARED or not both_have:
            continue
        if (reason := _describe_different_meanings(first, settings[number], title)) is not None:
            left_out.setdefault(title, reason)
        else:
            differences[number, title] = estimate_difference(first, settings[number], title)
    p_values = {key: difference.p_value for key, difference in differences.items()}
    tested = {key: p_value for key, p_value in p_values.items() if not math.isnan(p_value)}
    num_tests = len({title for _, title in tested}) * tried.num_differences
    significant = keep_significant(tested, num_tests)
    return SettingsComparison(first, titles, differences, significant, left_out, tried, num_tests)


def comparison_json(settings: Sequence[Setting], comparison: SettingsComparison) -> dict[str, Any]:
    """Return the comparison as JSON data; settings are numbered from 0."""
    return {
        "settings": [
            {
                "values": dict(setting.values),
                "runs": [str(run.folder) for run in setting.runs],
                "unfinished": [str(run.folder) for run in setting.runs if not run.measures],
                "measures": {
                    title: {"mean": mean.mean, "half": mean.half, "runs": mean.size}
                    for title, mean in setting.estimates().items()
                },
            }
            for setting in settings
        ],
        "reference": next((n for n, s in enumerate(settings) if s is comparison.baseline), None),
        "tried": {
            "settings": comparison.tried.num_settings,
            "places": [str(place) for place in comparison.tried.places],
            "is_reference_chosen": comparison.tried.is_baseline_chosen,
            "corrected_for": comparison.num_tests,
        },
        "differences": [
            {"setting": number, "measure": title, "verdict": comparison.verdict(number, title)}
            | {"mean": difference.estimate.mean, "half": difference.estimate.half}
            | {"more_seeds": comparison.more_seeds(number, title)}
            | {"prompt_share": difference.prompt_share}
            for (number, title), difference in comparison.differences.items()
        ],
        "not_compared": dict(comparison.left_out),
    }


def keep_significant(
    p_values: Mapping[SettingMeasure, float], num_tests: int
) -> frozenset[SettingMeasure]:
    """Return the keys of the p-values that Holm's method finds significant in ``num_tests`` tests.

    Tests without a p-value count as not significant. So several tables, each with a part of the
    tests, keep in total no more differences than one table of all tests.
    """
    kept = set()
    for num_kept, key in enumerate(sorted(p_values, key=p_values.__getitem__)):
        if p_values[key] > (1 - CONFIDENCE) / (num_tests - num_kept):
            break
        kept.add(key)
    return frozenset(kept)


def count_more_seeds(difference: Difference, level: float) -> int:
    """Return how many more seeds of both settings make the p-value less than ``level``.

    They do with probability ``POWER`` if the true difference and spread are as measured. The number
    is from normal quantiles, corrected for t (Guenther 1981, The American Statistician 35, 243).
    """
    z_level, z_power = NormalDist().inv_cdf(1 - level / 2), NormalDist().inv_cdf(POWER)
    seeds = difference.fewest_seeds
    error = difference.estimate.half / t_quantile(difference.freedom)
    effect = abs(difference.estimate.mean) / (error * math.sqrt(seeds))
    needed = ((z_level + z_power) / max(effect, TINY)) ** 2 + z_level * z_level / 2
    return max(1, math.ceil(needed) - seeds)


def estimate_difference(first: Setting, other: Setting, title: str) -> Difference:
    """Return the difference, ``other`` minus ``first``, of the measure ``title``.

    The degrees of freedom follow Welch and Satterthwaite; they are not rounded. For paired runs
    they are the number of pairs minus 1, as in Student's interval.
    """
    if pairs := _seed_pairs(first, other):
        samples = [[theirs.measures[title] - ours.measures[title] for ours, theirs in pairs]]
        mean = mean_of(samples[0])
    else:
        settings = (first.finished_runs(), other.finished_runs())
        samples = [[run.measures[title] for run in runs] for runs in settings]
        mean = mean_of(samples[1]) - mean_of(samples[0])
    size, fewest = sum(map(len, samples)), min(map(len, samples))
    if fewest < FEWEST_SEEDS or not math.isfinite(mean):
        return Difference(Estimate(mean, math.nan, size), fewest)
    variances = [statistics.variance(sample) / len(sample) for sample in samples]  # of the means
    terms = sum(v * v / (len(sample) - 1) for v, sample in zip(variances, samples, strict=True))
    freedom = sum(variances) ** 2 / terms if terms else size - len(samples)
    half = t_quantile(freedom) * math.sqrt(sum(variances))
    has_spread = half > TINY * abs(mean) or not mean
    estimate = Estimate(mean, half if has_spread else math.nan, size)
    prompt_noise = [variance_over_prompts(pair, title) for pair in pairs]
    known = [variance for variance in prompt_noise if variance is not None]
    is_known = len(known) == size and half > 0  # without pairs, ``known`` is empty
    prompt_share = min(1.0, mean_of(known) / (size * sum(variances))) if is_known else None
    return Difference(estimate, fewest, freedom, prompt_share)


def variance_over_prompts(pair: RunPair, title: str) -> float | None:
    """Return the variance that the held-out prompts add to the difference between a pair of runs.

    Return None if a run lacks the value of any prompt, or the runs may have different prompts: they
    share these if their answers before PPO (with the same random numbers) have equal lengths.
    """
    before, after = ([run.by_prompt.get(when, {}) for run in pair] for when in ("before", "after"))
    ours, theirs = (
        values.get(VALUES_BY_PROMPT.get(title, title.replace("judge ", "parts/")), [])
        for values in after
    )
    gains = [b - a for a, b in zip(ours, theirs, strict=False) if a is not None and b is not None]
    has_same_prompts = before[0].get("tokens") == before[1].get("tokens") is not None
    is_complete = 1 < len(gains) == len(ours) == len(theirs)
    return statistics.variance(gains) / len(gains) if has_same_prompts and is_complete else None


def _seed_pairs(first: Setting, other: Setting) -> list[RunPair]:
    """Pair the finished runs by seed; return [] for fewer than 2 pairs, unless no seed differs."""
    ours, theirs = ({run.seeds: run for run in each.finished_runs()} for each in (first, other))
    common = sorted(ours.keys() & theirs.keys())
    is_paired = len(common) > 1 or ours.keys() == theirs.keys()
    return [(ours[seed], theirs[seed]) for seed in common] if is_paired else []


def _is_redundant(title: str, titles: Mapping[str, None], settings: Sequence[Setting]) -> bool:
    """Return True if a measure repeats another, or all settings have the same values of it.

    PPO runs can share the accuracy and the perplexity of earlier phases: then all runs with the
    same seed have the same value.
    """
    runs = [run for setting in settings for run in setting.runs if title in run.measures]
    if title == "objective":
        is_score = all(run.measures["objective"] == run.measures.get("score") for run in runs)
        return "gold" in titles or is_score
    values = {(run.seeds, run.measures[title]) for run in runs}
    return title in OF_EARLIER_PHASES and len(values) == len({run.seeds for run in runs})


def _describe_different_meanings(first: Setting, other: Setting, title: str) -> str | None:
    """Return both meanings of a measure for the first pair of runs in which they differ, or None.

    Runs are compared in pairs with the same seed or, without such pairs, every run of ``first``
    with every run of ``other``.
    """
    pairs = _seed_pairs(first, other) or product(first.finished_runs(), other.finished_runs())
    meanings = ([run.meanings.get(title, "") for run in pair] for pair in pairs)
    return next((f"{ours}; {theirs}" for ours, theirs in meanings if ours != theirs), None)
