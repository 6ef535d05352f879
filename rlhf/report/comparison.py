"""Compare runs: compute means and intervals over seeds, and test whether settings differ.

Two settings with two or more common seeds are compared by the differences between their runs with
the same seed, otherwise by Welch's t-test (https://doi.org/10.1093/biomet/34.1-2.28). A difference
is reported only if its 95 % interval excludes 0, and never from one seed, because two runs with the
same setting differ too. Seeds without any spread give no interval, and so no verdict.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from rlhf.base.errors import CheckpointError
from rlhf.base.intervals import Estimate, mean_of, mean_with_interval, t_quantile
from rlhf.base.stored_files import RESULT, read_json
from rlhf.config.effects import effect_of
from rlhf.config.freeze import FROZEN, frozen_keys
from rlhf.config.schema.keys import NO_PHASE

if TYPE_CHECKING:
    from rich.table import Table

TINY = 1e-9  # half-width of an interval, relative to the mean, that is only rounding
# Endings of keys whose value the planner chooses.
CHOSEN = ("micro_batch_size", "max_rows", "gather_weights", "keep_graphs")


class Measure(NamedTuple):
    """A number in result.json: its title here, its name there, and the phases that may have it."""

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
    """Value by key of the configuration, without keys that change no result."""
    measures: Mapping[str, float]
    """Value by title; empty if the run has not finished."""

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
        """Return the mean and interval over the seeds, by title, of measures that all runs have."""
        if not (runs := self.finished_runs()):
            return {}
        titles = [title for title in runs[0].measures if all(title in r.measures for r in runs[1:])]
        return {
            title: mean_with_interval([run.measures[title] for run in runs]) for title in titles
        }


class Difference(NamedTuple):
    """The difference of a measure between a setting and the first setting."""

    estimate: Estimate
    fewest_seeds: int  # the smaller number of seeds of the two settings

    @property
    def verdict(self) -> str:
        """Return "higher", "lower", "-" (not significant), "one seed" or "no spread"."""
        if math.isnan(self.estimate.half):
            return "one seed" if self.fewest_seeds == 1 else "no spread"
        if not self.estimate.excludes_zero:
            return "-"
        return "higher" if self.estimate.mean > 0 else "lower"


def find_run_folders(paths: Iterable[Path]) -> list[Path]:
    """Return the run directories: each path that is a run, and all runs below the other paths.

    Raises:
        CheckpointError: if a path is no run and has no run below it.
    """
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


def read_run(folder: Path) -> ComparedRun:
    """Read the configuration and the measures of a run; it has no measures before it finishes."""
    keys = {key: v for key, v in frozen_keys(folder).items() if not _is_bookkeeping(key)}
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
    return ComparedRun(folder, keys, {k: v for k, v in measures.items() if v is not None})


def group_by_setting(runs: Sequence[ComparedRun]) -> list[Setting]:
    """Group runs whose keys are equal except for the seed; keep the order of the runs."""
    names = dict.fromkeys(key for run in runs for key in run.keys)
    varied = [key for key in names if len({json.dumps(r.keys.get(key)) for r in runs}) > 1]
    settings: dict[str, Setting] = {}
    for run in runs:
        values = {key: run.keys.get(key) for key in varied if key != "seed"}
        settings.setdefault(json.dumps(values), Setting(values, [])).runs.append(run)
    return list(settings.values())


def difference(first: Setting, other: Setting, title: str) -> Difference:
    """Return the difference, ``other`` minus ``first``, of the measure ``title``."""
    ours = {run.seed: run.measures[title] for run in first.finished_runs()}
    theirs = {run.seed: run.measures[title] for run in other.finished_runs()}
    common = sorted(ours.keys() & theirs.keys())
    if len(common) > 1 or ours.keys() == theirs.keys():
        found = mean_with_interval([theirs[s] - ours[s] for s in common])
        return Difference(_drop_interval_without_spread(found), len(common))
    found = _drop_interval_without_spread(_welch(list(ours.values()), list(theirs.values())))
    return Difference(found, min(len(ours), len(theirs)))


def _drop_interval_without_spread(found: Estimate) -> Estimate:
    """Replace the interval of a nonzero difference by NaN if the seeds have no spread."""
    has_spread = found.half > TINY * abs(found.mean)
    return found if has_spread or not found.mean else found._replace(half=math.nan)


def _welch(first: Sequence[float], other: Sequence[float]) -> Estimate:
    """Return the difference of the means of two independent samples, with its 95 % interval.

    The degrees of freedom follow Welch and Satterthwaite; they are not rounded.
    """
    mean = mean_of(other) - mean_of(first)
    size = len(first) + len(other)
    if min(len(first), len(other)) == 1 or not math.isfinite(mean):
        return Estimate(mean, math.nan, size)
    parts = [statistics.variance(each) / len(each) for each in (first, other)]
    if not sum(parts):
        return Estimate(mean, 0.0, size)
    terms = [p * p / (len(e) - 1) for p, e in zip(parts, (first, other), strict=True)]
    freedom = sum(parts) ** 2 / sum(terms)
    return Estimate(mean, t_quantile(freedom) * math.sqrt(sum(parts)), size)


def comparison_json(settings: Sequence[Setting]) -> dict[str, Any]:
    """Return the comparison as JSON data: per setting its values, run folders and measures."""
    return {
        "settings": [
            {
                "values": dict(setting.values),
                "runs": [str(run.folder) for run in setting.runs],
                "unfinished": [str(run.folder) for run in setting.runs if not run.measures],
                "measures": {
                    title: {
                        "mean": found.mean,
                        "half": _nan_as_none(found.half),
                        "runs": found.size,
                    }
                    for title, found in setting.estimates().items()
                },
            }
            for setting in settings
        ]
    }


def comparison_table(settings: Sequence[Setting]) -> Table:
    """Return a table of all settings: means with 95 % intervals, and differences from the first."""
    from rich import box
    from rich.table import Table

    done = [setting for setting in settings if setting.finished_runs()]
    caption = f"Differences are from {done[0].label}; -: none can be told." if done else None
    table = Table(box=box.SIMPLE_HEAD, caption=caption, caption_justify="left")
    for title in ("setting", "measure", "mean", "difference", ""):
        table.add_column(title, justify="right" if title in {"mean", "difference"} else "left")
    for setting in settings:
        count = f"{len(setting.finished_runs())} of {len(setting.runs)} runs"
        names = iter((setting.label, count))
        for title, mean in setting.estimates().items():
            is_compared = setting is not done[0] and title in done[0].estimates()
            told = difference(done[0], setting, title) if is_compared else None
            cells = [estimate_text(told.estimate, "+"), told.verdict] if told else []
            table.add_row(next(names, ""), title, estimate_text(mean), *cells)
        for name in names:
            table.add_row(name)
        table.add_section()
    return table


def command_line_text(value: object) -> str:
    """Return a value as command-line text."""
    if isinstance(value, bool) or value is None:
        return str(value).lower().replace("none", "null")
    return f"{value:g}" if isinstance(value, float) else str(value)


def estimate_text(found: Estimate, sign: str = "") -> str:
    """Return a mean and the half-width of its interval as text, such as "0.123 ± 0.045"."""
    interval = "" if math.isnan(found.half) else f" ± {found.half:.3f}"
    return f"{found.mean:{sign}.3f}{interval}"


def _nan_as_none(value: float) -> float | None:
    return None if math.isnan(value) else value


def _is_bookkeeping(key: str) -> bool:
    """Return True if the key changes no result, or the planner chose its value."""
    try:
        return effect_of(key).affects is NO_PHASE or key.endswith(CHOSEN)
    except KeyError:  # another version of this project wrote the run
        return False
