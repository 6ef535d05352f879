"""Write ``sweep.html``: the settings of a sweep, their curves and the effect of parameters.

The page is one file that loads nothing. It is made only from the results of the runs, so a sweep
that was stopped has a page too.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rlhf.base.atomic import replace_atomically
from rlhf.base.intervals import Estimate, mean_with_interval
from rlhf.report.charts import Chart
from rlhf.report.comparison import (
    ComparedRun,
    Setting,
    command_line_text,
    difference,
    estimate_text,
)
from rlhf.report.page import Headline, render_template
from rlhf.report.setting_curves import setting_curves
from rlhf.report.sweep_charts import (
    Axis,
    Place,
    frontier_chart,
    is_number,
    parallel_chart,
    parameter_chart,
)

SWEEP_REPORT = "sweep.html"
KL = "KL, nats"
GOALS = ("gold", "exactly right", "score")  # measures that are drawn over KL
UNDRAWN = ("minutes",)  # measures that are not drawn, as they depend on the machine's other load
MOST_VALUES, BINS = 8, 4  # more than MOST_VALUES numbers of a parameter are grouped into BINS


class Shares(NamedTuple):
    """The share of a measure's variance that each parameter explains alone."""

    title: str
    of_parameter: dict[str, float]


def write_sweep_report(sweep_dir: Path, settings: Sequence[Setting]) -> Path:
    """Write the report of a sweep to its folder; return the path of the page."""
    path = sweep_dir / SWEEP_REPORT
    with replace_atomically(path) as building:
        building.write_text(sweep_page(f"Sweep {sweep_dir.name}", settings), encoding="utf-8")
    return path


def sweep_page(title: str, settings: Sequence[Setting]) -> str:
    """Return the HTML of a comparison of settings; the best setting comes first."""
    runs = [run for setting in settings for run in setting.runs]
    done = sorted(
        (setting for setting in settings if setting.finished_runs()),
        key=lambda setting: -setting.estimates()["objective"].mean,
    )
    unfinished = [setting for setting in settings if not setting.finished_runs()]
    finished = sum(bool(run.measures) for run in runs)
    return render_template(
        "sweep.html",
        scripts=["sweep.js"],
        title=title,
        verdict=_headline(done),
        place=f"{finished} of {len(runs)} runs have finished",
        curves=setting_curves([*done, *unfinished]),
        **(_tables_and_charts(done) if done else {"table": None}),
    )


def parameter_importances(runs: Sequence[ComparedRun], keys: Sequence[str], title: str) -> Shares:
    """Return, for each key, the share of a measure's variance that the key's values explain.

    The share is epsilon squared (Kelley 1935, https://doi.org/10.1073/pnas.21.9.554), from which
    the share explained by chance is subtracted. Keys with many numbers are grouped into ranges.
    """
    found = {}
    for key in keys:
        groups = _measures_by_value(runs, key, title)
        values = [value for group in groups for value in group]
        freedom = len(values) - len(groups)
        total = statistics.pvariance(values) * len(values)
        if freedom <= 0 or len(groups) == 1 or total == 0:
            continue
        within = sum(statistics.pvariance(group) * len(group) for group in groups) / freedom
        found[key] = max(0.0, (total - within * (len(values) - 1)) / total)
    return Shares(title, dict(sorted(found.items(), key=lambda each: -each[1])))


def _measures_by_value(runs: Sequence[ComparedRun], key: str, title: str) -> list[list[float]]:
    values = [run.keys.get(key) for run in runs]
    if len({command_line_text(value) for value in values}) > MOST_VALUES and all(
        map(is_number, values)
    ):
        ordered = sorted(runs, key=lambda run: run.keys[key])
        names = {id(run): str(BINS * rank // len(runs)) for rank, run in enumerate(ordered)}
    else:
        names = {id(run): command_line_text(value) for run, value in zip(runs, values, strict=True)}
    groups: dict[str, list[float]] = {}
    for run in runs:
        groups.setdefault(names[id(run)], []).append(run.measures[title])
    return list(groups.values())


def _headline(done: Sequence[Setting]) -> Headline:
    """Return the headline: the best setting, and whether it differs from the second best."""
    if not done:
        return Headline("No run has finished.", is_doubtful=True)
    best = f"best objective {estimate_text(done[0].estimates()['objective'])}: {done[0].label}"
    if len(done) == 1:
        return Headline(best, is_doubtful=False)
    told = difference(done[1], done[0], "objective").verdict
    differs = {
        "-": "no difference from the second best can be told",
        "one seed": "one seed only",
        "no spread": "no spread between seeds",
    }
    ending = differs.get(told, "higher than the second best")
    return Headline(f"{best}; {ending}", is_doubtful=told != "higher")


def _tables_and_charts(done: Sequence[Setting]) -> dict[str, Any]:
    """Return the template values for settings with finished runs: tables and charts by name."""
    runs = [run for setting in done for run in setting.finished_runs()]
    titles = [title for title in done[0].estimates() if all(title in s.estimates() for s in done)]
    drawn = [title for title in titles if _is_drawn(title, titles, done)]
    keys = list(done[0].values)
    frontiers = [_frontier_over_kl(done, goal) for goal in GOALS if goal in titles]
    parts: dict[str, Any] = {
        "table": _settings_table(
            done, [title for title in titles if not _repeats_gold_score(title, titles)]
        ),
        "frontiers": frontiers if KL in titles and len(done) > 1 else [],
        "parallel": None,
    }
    if keys:
        columns = [Axis(key, [setting.values[key] for setting in done]) for key in keys]
        columns += [Axis(t, [setting.estimates()[t].mean for setting in done]) for t in drawn]
        ranks = [1 - place / max(len(done) - 1, 1) for place in range(len(done))]
        shares = [parameter_importances(runs, [*keys, "seed"], title) for title in drawn]
        parts |= {
            "parallel": parallel_chart(columns, ranks),
            "parameters": [_parameter_chart(runs, key, title) for key in keys for title in drawn],
            "importances": shares,
            "explaining": list(dict.fromkeys(key for each in shares for key in each.of_parameter)),
        }
    return parts


def _is_drawn(title: str, titles: Sequence[str], done: Sequence[Setting]) -> bool:
    """Return False for a measure that repeats another measure or is equal in all settings."""
    if title in UNDRAWN or _repeats_gold_score(title, titles):
        return False
    return len({setting.estimates()[title].mean for setting in done}) > 1 or len(done) == 1


def _repeats_gold_score(title: str, titles: Sequence[str]) -> bool:
    """Return True for the objective of runs with a judge, which repeats the gold score."""
    return title == "objective" and "gold" in titles


class SettingsTable(NamedTuple):
    """The titles of measures, and a row per setting."""

    titles: Sequence[str]
    rows: Sequence[SettingsRow]


class SettingsRow(NamedTuple):
    """A setting: its label, its runs, its measures, and how its objective differs from the best."""

    label: str
    runs: str
    measures: Sequence[str]
    difference: str


def _settings_table(done: Sequence[Setting], titles: Sequence[str]) -> SettingsTable:
    rows = []
    for number, setting in enumerate(done):
        found = setting.estimates()
        told = difference(done[0], setting, "objective").verdict if number else ""
        counted = f"{len(setting.finished_runs())} of {len(setting.runs)}"
        measures = [estimate_text(found[title]) for title in titles]
        rows.append(
            SettingsRow(setting.label, counted, measures, told.replace("-", "no difference"))
        )
    return SettingsTable(titles, rows)


def _frontier_over_kl(done: Sequence[Setting], goal: str) -> Chart | None:
    places = [
        Place(number, setting.label, setting.estimates()[KL], setting.estimates()[goal])
        for number, setting in enumerate(done)
    ]
    return frontier_chart(
        f"{goal.capitalize()} over KL", places, x_label="KL to the reference, nats"
    )


def _parameter_chart(runs: Sequence[ComparedRun], key: str, title: str) -> Chart | None:
    measured: dict[str, tuple[object, list[float]]] = {}
    for run in runs:
        value = run.keys.get(key)
        measured.setdefault(command_line_text(value), (value, []))[1].append(run.measures[title])
    groups = list(measured.values())
    if all(is_number(value) for value, _ in groups):
        groups.sort(key=lambda group: float(str(group[0])))
    found: list[Estimate] = [mean_with_interval(values) for _, values in groups]
    return parameter_chart(f"{key}: {title}", [value for value, _ in groups], found)
