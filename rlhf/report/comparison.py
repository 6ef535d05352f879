"""Read runs to compare, group them by setting, and test over seeds whether settings differ.

Only numbers with the same meaning are compared. The meaning of a score is the reward that gave it.
A reward model is identified by the hash of its weights, so scores are compared only between runs
that share it (``from_run``, the store of phases).

Two settings with two or more common seeds are compared by the differences between their runs with
the same seed, otherwise by Welch's t-test (https://doi.org/10.1093/biomet/34.1-2.28). A difference
is reported only if its 95 % interval excludes 0 and Holm's correction for all differences of the
comparison keeps it (https://www.jstor.org/stable/4615733). It is never reported from fewer than
three seeds: Student's interval of two seeds is 12.7 standard errors to each side. Seeds without any
spread give no interval, and so no verdict.
"""

from __future__ import annotations

import json
import math
import re
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from rlhf.base.errors import CheckpointError
from rlhf.base.finite_numbers import replace_non_finite
from rlhf.base.hashing import sha256_of
from rlhf.base.intervals import (
    LEVEL,
    Estimate,
    mean_of,
    mean_with_interval,
    t_quantile,
    two_sided_p_value,
)
from rlhf.base.manifest import MANIFEST
from rlhf.base.stored_files import MANIFEST_FORM, RESULT, read_json
from rlhf.config.choices import ModelInit, RewardKind
from rlhf.config.effects import effect_of
from rlhf.config.freeze import FROZEN, read_frozen_keys
from rlhf.config.schema.keys import NO_PHASE
from rlhf.report.summary import describe_objective

FEWEST_SEEDS = 3  # with two seeds, the interval would be ± 12.7 standard errors
SEEDS_IN_WORDS = {1: "one seed", 2: "two seeds"}
# The last parts of keys whose values the planner chooses; such keys are not compared.
CHOSEN = ("micro_batch_size", "max_rows", "gather_weights", "keep_graphs")
SHOWN = 8  # digits of a hash that are shown
TINY = 1e-9  # a half-width below this share of the mean is only rounding error
UNCOMPARED = ("minutes",)  # measures that depend on the machine's other load
OF_EARLIER_PHASES = ("accuracy", "perplexity")  # measures of phases before PPO

SettingMeasure = tuple[int, str]  # the number of a setting, and the title of a measure


class Measure(NamedTuple):
    """A number in result.json: its title in comparisons, its name, and phases that have it."""

    title: str
    name: str
    phases: tuple[str, ...] = ("ppo", "dpo")


MEASURES = (
    Measure("exactly right", "exact_after"),
    Measure("gold", "gold_after"),
    Measure("score", "score_after"),
    Measure("KL, nats", "kl_to_reference"),
    Measure("tokens", "response_tokens_after"),
    Measure("accuracy", "accuracy", ("dpo", "reward")),
    Measure("perplexity", "perplexity_after", ("sft",)),
)


class ComparedRun(NamedTuple):
    """A run to compare: its folder, its configuration and its measures."""

    folder: Path
    keys: Mapping[str, Any]
    """Values of the configuration by key, without keys that change no result."""
    measures: Mapping[str, float]
    """Value of each measure by title; empty if the run has not finished."""
    meanings: Mapping[str, str] = {}
    """What a measure means, by title; measures without an entry mean the same in every run."""

    @property
    def seed(self) -> int:
        """Return the seed of the run."""
        return int(self.keys["seed"])


class Setting(NamedTuple):
    """Runs that differ only in their seed; ``values`` has the keys in which settings differ."""

    values: Mapping[str, Any]
    runs: list[ComparedRun]

    @property
    def label(self) -> str:
        """Return the values as overrides, or "all" if there is only one setting."""
        return (
            " ".join(f"{key}={command_line_text(value)}" for key, value in self.values.items())
            or "all"
        )

    def finished_runs(self) -> list[ComparedRun]:
        """Return the runs that have a result."""
        return [run for run in self.runs if run.measures]

    def estimates(self) -> dict[str, Estimate]:
        """Return the mean and interval over seeds of each measure that all finished runs have."""
        if not (runs := self.finished_runs()):
            return {}
        titles = [title for title in runs[0].measures if all(title in r.measures for r in runs[1:])]
        return {title: mean_over_seeds([run.measures[title] for run in runs]) for title in titles}


def find_run_folders(paths: Iterable[Path]) -> list[Path]:
    """Return the run directories: each path that is a run, and all runs below the other paths."""
    found = []
    for path in paths:
        below = sorted(file.parent for file in path.rglob(FROZEN)) if path.is_dir() else []
        runs = [path] if (path / FROZEN).is_file() else below
        if not runs:
            raise CheckpointError(
                f"{path} holds no run: neither it nor a folder in it has {FROZEN}"
            )
        found += runs
    return found


def read_compared_run(folder: Path) -> ComparedRun:
    """Read the configuration and the measures of a run; it has no measures before it finishes."""
    frozen = read_frozen_keys(folder)
    keys = {key: v for key, v in frozen.items() if not _is_ignored_key(key)}
    keys["phase"] = (frozen.get("phase.order") or [None])[-1]  # earlier phases may be reused
    result = read_json(folder / "result.json", RESULT)
    # The objective is null if it was not a finite number; the run then counts as unfinished.
    if result is None or result["objective"] is None:
        return ComparedRun(folder, keys, {})
    measures = {"objective": result["objective"]}
    for measure in MEASURES:
        for phase in measure.phases:
            if measure.name in result["phases"].get(phase, {}):
                measures.setdefault(measure.title, result["phases"][phase][measure.name])
    measures["minutes"] = 60 * result["measured"]["hours"]
    known = {title: value for title, value in measures.items() if value is not None}
    return ComparedRun(folder, keys, known, measure_meanings(folder, frozen, result["phases"]))


def group_runs_by_setting(runs: Sequence[ComparedRun]) -> list[Setting]:
    """Group runs whose keys are equal except for the seed; keep the order of the runs.

    If two runs have the same seed too, for example before and after an edit of the code, the second
    run gets a setting of its own, with repeat=2.
    """
    names = dict.fromkeys(key for run in runs for key in run.keys)
    varied = [key for key in names if len({json.dumps(r.keys.get(key)) for r in runs}) > 1]
    settings: dict[str, Setting] = {}
    seen: Counter[str] = Counter()
    for run in runs:
        values = {key: run.keys[key] for key in varied if key in run.keys and key != "seed"}
        same = json.dumps(run.keys)
        seen[same] += 1
        if seen[same] > 1:
            values["repeat"] = seen[same]
        settings.setdefault(json.dumps(values), Setting(values, [])).runs.append(run)
    return list(settings.values())


def mean_over_seeds(values: Sequence[float]) -> Estimate:
    """Return the mean with its interval; its half-width is NaN with too few values (seeds)."""
    found = mean_with_interval(values)
    return found if len(values) >= FEWEST_SEEDS else found._replace(half=math.nan)


def comparison_json(settings: Sequence[Setting]) -> dict[str, Any]:
    """Return the comparison as JSON data: per setting its values, run folders and measures."""
    content = [
        {
            "values": dict(setting.values),
            "runs": [str(run.folder) for run in setting.runs],
            "unfinished": [str(run.folder) for run in setting.runs if not run.measures],
            "measures": {
                title: {"mean": found.mean, "half": found.half, "runs": found.size}
                for title, found in setting.estimates().items()
            },
        }
        for setting in settings
    ]
    return {"settings": replace_non_finite(content)}


def command_line_text(value: object) -> str:
    """Return a value of the configuration as the text that a user would type."""
    if isinstance(value, bool) or value is None:
        return str(value).lower().replace("none", "null")
    return f"{value:g}" if isinstance(value, float) else str(value)


def estimate_text(found: Estimate, sign: str = "") -> str:
    """Return a mean and the half-width of its interval as text, such as "0.123 ± 0.045"."""
    interval = "" if math.isnan(found.half) else f" ± {found.half:.3f}"
    return f"{found.mean:{sign}.3f}{interval}"


def _is_ignored_key(key: str) -> bool:
    """Return True if the key changes no result, or its value is chosen by the planner."""
    try:
        return effect_of(key).affects is NO_PHASE or key.endswith(CHOSEN)
    except KeyError:  # another version of this project wrote the run
        return False


def measure_meanings(
    folder: Path, keys: Mapping[str, Any], phases: Mapping[str, Mapping[str, Any]]
) -> dict[str, str]:
    """Return a description of each measure whose meaning can differ between runs, by title.

    ``keys`` is the configuration of the run in ``folder``, ``phases`` the results of its phases.
    """
    accuracy_of = "DPO" if "dpo" in phases else "the reward model"
    meanings = {
        "score": f"by {_scorer_name(folder, keys)}",
        "accuracy": f"of {accuracy_of} on {_data_and_tokenizer_name(keys)}",
        "perplexity": f"of {_data_and_tokenizer_name(keys)}",
    }
    name = describe_objective(phases)
    measured = next((title for title in meanings if title in name), None)
    return meanings | {"objective": f"{name}, {meanings[measured]}" if measured else name}


def _scorer_name(folder: Path, keys: Mapping[str, Any]) -> str:
    """Return a name of what scored the answers: a reward model, the judge or a mix of rewards."""
    parts = {key: value for key, value in keys.items() if key.startswith("rewards.")}
    kinds = {value for key, value in parts.items() if re.fullmatch(r"rewards\.[^.]+\.kind", key)}
    if not parts and keys.get("reward_model.init") == ModelInit.gold:
        return "the judge"
    found = [f"rewards {_short_hash(parts)}"] if parts else []
    if not parts or RewardKind.model in kinds:
        found.append(f"reward model {_reward_model_hash(folder, keys)}")
    return " with ".join(found)


def _reward_model_hash(folder: Path, keys: Mapping[str, Any]) -> str:
    """Return a hash of the reward model's saved weights or, without these, of its config keys."""
    path = folder / "reward" / MANIFEST
    if (manifest := read_json(path, MANIFEST_FORM)) is not None:
        files = manifest["files"]
        return _short_hash({name: files[name] for name in files if name.endswith(".safetensors")})
    return _short_hash({key: keys[key] for key in keys if key.startswith("reward_model.")})


def _data_and_tokenizer_name(keys: Mapping[str, Any]) -> str:
    """Return a name of the run's data and tokenizer, on which accuracy and perplexity depend."""
    data = [keys.get(f"data.{name}") for name in ("source", "path", "eval_path", "subset")]
    tokenizer = [keys.get(f"model.{name}") for name in ("tokenizer", "path", "vocab_size")]
    named = [str(value) for value in (*data, *tokenizer) if value is not None]
    return " ".join(named)


def _short_hash(values: Mapping[str, Any]) -> str:
    text = json.dumps(values, sort_keys=True)
    return sha256_of(text.encode())[:SHOWN]


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
    def p_value(self) -> float:
        """Return the p-value of the difference; NaN without an interval."""
        return two_sided_p_value(self.estimate, self.freedom)


class SettingsComparison(NamedTuple):
    """All settings compared with the first that has finished runs, the reference."""

    reference: Setting | None
    titles: Sequence[str]  # measures to show
    differences: Mapping[SettingMeasure, Difference]
    kept: frozenset[SettingMeasure]  # differences that are significant after the correction
    left_out: Mapping[str, str]  # why a measure is not compared, by title

    @property
    def num_tests(self) -> int:
        """Return the number of differences that were tested."""
        return sum(not math.isnan(found.p_value) for found in self.differences.values())

    def verdict(self, setting: int, title: str) -> str:
        """Return the verdict on a measure after Holm's correction; "" if it is not compared."""
        if (found := self.differences.get((setting, title))) is None:
            return ""
        is_told = found.verdict in {"higher", "lower"}
        return "-" if is_told and (setting, title) not in self.kept else found.verdict


def compare_with_first(settings: Sequence[Setting]) -> SettingsComparison:
    """Compare the settings with the first that has finished runs, in measures of equal meaning.

    Measures that all settings share, or that repeat another measure, are not shown.
    """
    numbers = [number for number, setting in enumerate(settings) if setting.finished_runs()]
    if not numbers:
        return SettingsComparison(None, [], {}, frozenset(), {})
    first, others = settings[numbers[0]], numbers[1:]
    every = dict.fromkeys(title for n in numbers for title in settings[n].estimates())
    titles = [title for title in every if not _is_redundant(title, every, settings)]
    found: dict[SettingMeasure, Difference] = {}
    left_out: dict[str, str] = {}
    for number in others:
        for title in titles:
            both_have = all(title in each.estimates() for each in (first, settings[number]))
            if title in UNCOMPARED or not both_have:
                continue
            if (reason := _describe_different_meanings(first, settings[number], title)) is not None:
                left_out.setdefault(title, reason)
            else:
                found[number, title] = estimate_difference(first, settings[number], title)
    probabilities = {place: each.p_value for place, each in found.items()}
    return SettingsComparison(first, titles, found, keep_significant(probabilities), left_out)


def differences_json(settings: Sequence[Setting], found: SettingsComparison) -> dict[str, Any]:
    """Return the differences from the reference as JSON data; settings are numbered from 0."""
    return {
        "reference": next((n for n, each in enumerate(settings) if each is found.reference), None),
        "differences": [
            {"setting": number, "measure": title, "verdict": found.verdict(number, title)}
            | {"mean": difference.estimate.mean, "half": difference.estimate.half}
            for (number, title), difference in found.differences.items()
        ],
        "not_compared": dict(found.left_out),
    }


def keep_significant(probabilities: Mapping[SettingMeasure, float]) -> frozenset[SettingMeasure]:
    """Return the keys of the p-values that are significant after Holm's correction."""
    tested = {place: p for place, p in probabilities.items() if not math.isnan(p)}
    kept = set()
    for number, place in enumerate(sorted(tested, key=tested.__getitem__)):
        if tested[place] > (1 - LEVEL) / (len(tested) - number):
            break
        kept.add(place)
    return frozenset(kept)


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
    parts = [statistics.variance(sample) / len(sample) for sample in samples]
    terms = sum(p * p / (len(sample) - 1) for p, sample in zip(parts, samples, strict=True))
    freedom = sum(parts) ** 2 / terms if terms else size - len(samples)
    half = t_quantile(freedom) * math.sqrt(sum(parts))
    has_spread = half > TINY * abs(mean) or not mean
    return Difference(Estimate(mean, half if has_spread else math.nan, size), fewest, freedom)


def _seed_pairs(first: Setting, other: Setting) -> list[tuple[ComparedRun, ComparedRun]]:
    """Return pairs of finished runs with the same seed; [] if there are too few such pairs."""
    ours, theirs = ({run.seed: run for run in each.finished_runs()} for each in (first, other))
    common = sorted(ours.keys() & theirs.keys())
    is_paired = len(common) > 1 or ours.keys() == theirs.keys()
    return [(ours[seed], theirs[seed]) for seed in common] if is_paired else []


def _is_redundant(title: str, titles: Mapping[str, None], settings: Sequence[Setting]) -> bool:
    """Return True if a measure repeats the gold score, or a result that all settings share.

    Settings of PPO can share the accuracy and the perplexity of earlier phases: then all runs with
    the same seed have the same value.
    """
    if title == "objective" and "gold" in titles:
        return True
    runs = [run for setting in settings for run in setting.runs if title in run.measures]
    values = {(run.seed, run.measures[title]) for run in runs}
    return title in OF_EARLIER_PHASES and len(values) == len({run.seed for run in runs})


def _describe_different_meanings(first: Setting, other: Setting, title: str) -> str | None:
    """Return both meanings of a measure as text; None if it means the same in compared runs.

    Runs are compared in pairs with the same seed or, without such pairs, every run of ``first``
    with every run of ``other``.
    """
    pairs = _seed_pairs(first, other) or product(first.finished_runs(), other.finished_runs())
    meanings = ([run.meanings.get(title, "") for run in pair] for pair in pairs)
    return next((f"{one}; {two}" for one, two in meanings if one != two), None)
