"""Write ``sweep.html``: the settings of a sweep, their frontier, and what each parameter did.

The page is one file that loads nothing. It is made from the results of the runs alone, so that a
sweep that was stopped has one too.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from rlhf.atomic import replacing
from rlhf.intervals import Estimate, estimate
from rlhf.tracking.comparison import ComparedRun, Setting, cell, difference, shown
from rlhf.tracking.report.markup import Markup, joined, tag
from rlhf.tracking.report.page import document, scrolled, section
from rlhf.tracking.report.sweep_charts import (
    Axis,
    Place,
    frontier_chart,
    is_number,
    parallel_chart,
    parameter_chart,
)

SWEEP_REPORT = "sweep.html"
KL = "KL, nats"
GOALS = ("gold", "exactly right", "score")  # what is drawn over KL
UNDRAWN = ("minutes",)  # measures that depend on what else the machine did
MOST_VALUES, BINS = 8, 4  # more values of a parameter are grouped into bins


class Shares(NamedTuple):
    """The share of a measure's variance that each parameter explains alone."""

    title: str
    of_parameter: dict[str, float]


def write_sweep_report(sweep_dir: Path, settings: Sequence[Setting]) -> Path:
    """Write the report of a sweep to its folder; return the path of the page."""
    path = sweep_dir / SWEEP_REPORT
    with replacing(path) as building:
        building.write_text(sweep_page(sweep_dir.name, settings), encoding="utf-8")
    return path


def sweep_page(name: str, settings: Sequence[Setting]) -> str:
    """Return the page of a sweep; the best setting comes first."""
    runs = [run for setting in settings for run in setting.runs]
    done = sorted(
        (setting for setting in settings if setting.finished()),
        key=lambda setting: -setting.estimates()["objective"].mean,
    )
    body = joined(
        tag("header", tag("h1", f"Sweep {name}"), _verdict(done), _count(runs)),
        tag("main", *(_parts(done) if done else ())),
    )
    return document(f"Sweep {name}", body, script="sweep.js")


def importances(runs: Sequence[ComparedRun], keys: Sequence[str], title: str) -> Shares:
    """Return the share of a measure's variance that lies between the values of each key.

    The share is epsilon squared (Kelley 1935, https://doi.org/10.1073/pnas.21.9.554): what a key
    explains by chance alone is subtracted. Of keys with many values, ranges are compared.
    """
    found = {}
    for key in keys:
        groups = _groups(runs, key, title)
        values = [value for group in groups for value in group]
        freedom = len(values) - len(groups)
        total = statistics.pvariance(values) * len(values)
        if freedom <= 0 or len(groups) == 1 or total == 0:
            continue
        within = sum(statistics.pvariance(group) * len(group) for group in groups) / freedom
        found[key] = max(0.0, (total - within * (len(values) - 1)) / total)
    return Shares(title, dict(sorted(found.items(), key=lambda each: -each[1])))


def _groups(runs: Sequence[ComparedRun], key: str, title: str) -> list[list[float]]:
    values = [run.keys.get(key) for run in runs]
    if len({shown(value) for value in values}) > MOST_VALUES and all(map(is_number, values)):
        ordered = sorted(runs, key=lambda run: run.keys[key])
        names = {id(run): str(BINS * rank // len(runs)) for rank, run in enumerate(ordered)}
    else:
        names = {id(run): shown(value) for run, value in zip(runs, values, strict=True)}
    groups: dict[str, list[float]] = {}
    for run in runs:
        groups.setdefault(names[id(run)], []).append(run.measures[title])
    return list(groups.values())


def _verdict(done: Sequence[Setting]) -> Markup:
    """Return one line: the best setting, and whether it differs from the second."""
    if not done:
        return tag("p", "No run has finished.", class_="verdict doubtful")
    best = f"best objective {cell(done[0].estimates()['objective'])}: {done[0].label}"
    if len(done) == 1:
        return tag("p", best, class_="verdict")
    told = difference(done[1], done[0], "objective").verdict
    differs = {
        "-": "no difference from the second best can be told",
        "one seed": "one seed only",
        "no spread": "no spread between seeds",
    }
    ending = differs.get(told, "higher than the second best")
    return tag(
        "p", f"{best}; {ending}", class_="verdict" if told == "higher" else "verdict doubtful"
    )


def _count(runs: Sequence[ComparedRun]) -> Markup:
    finished = sum(bool(run.measures) for run in runs)
    return tag("p", f"{finished} of {len(runs)} runs have finished", class_="path")


def _parts(done: Sequence[Setting]) -> Iterator[Markup]:
    runs = [run for setting in done for run in setting.finished()]
    titles = [title for title in done[0].estimates() if all(title in s.estimates() for s in done)]
    drawn = [title for title in titles if _is_drawn(title, titles, done)]
    keys = [key for key in done[0].values]
    of_table = [title for title in titles if not _repeats(title, titles)]
    yield section("Settings", _explanation(), _table(done, of_table))
    if KL in titles and len(done) > 1:
        charts = [_frontier(done, goal) for goal in GOALS if goal in titles]
        note = tag("p", "The line joins settings that no other beats in both.", class_="note")
        yield section("Frontier", note, tag("div", *charts, class_="charts"))
    if keys:
        columns = [Axis(key, [setting.values[key] for setting in done]) for key in keys]
        columns += [Axis(t, [setting.estimates()[t].mean for setting in done]) for t in drawn]
        ranks = [1 - place / max(len(done) - 1, 1) for place in range(len(done))]
        yield section("All settings", parallel_chart("Parallel coordinates", columns, ranks))
        charts = [_parameter(runs, key, title) for key in keys for title in drawn]
        note = tag("p", "Means over all runs with the value, with 95 % intervals.", class_="note")
        yield section("Parameters", note, tag("div", *charts, class_="charts"))
        yield from _importance([importances(runs, [*keys, "seed"], title) for title in drawn])


def _is_drawn(title: str, titles: Sequence[str], done: Sequence[Setting]) -> bool:
    """Return False for a measure that another repeats, or that is the same in all settings."""
    if title in UNDRAWN or _repeats(title, titles):
        return False
    return len({setting.estimates()[title].mean for setting in done}) > 1 or len(done) == 1


def _repeats(title: str, titles: Sequence[str]) -> bool:
    """Return True for the objective of runs with a judge: it is the gold score."""
    return title == "objective" and "gold" in titles


def _explanation() -> Markup:
    return tag(
        "p",
        "Means over seeds with 95 % intervals; the best objective is first. "
        "The last column compares a setting's objective with the first.",
        class_="note",
    )


def _table(done: Sequence[Setting], titles: Sequence[str]) -> Markup:
    head = ("", "setting", "runs", *titles, "than the first")
    rows = []
    for number, setting in enumerate(done):
        found = setting.estimates()
        told = difference(done[0], setting, "objective").verdict if number else ""
        pick = tag("button", str(number + 1), type="button", aria_pressed="false", data_pick=number)
        cells = [tag("td", pick), tag("th", setting.label, scope="row")]
        cells += [tag("td", f"{len(setting.finished())} of {len(setting.runs)}", class_="number")]
        cells += [tag("td", cell(found[title]), class_="number") for title in titles]
        rows.append(tag("tr", *cells, tag("td", told.replace("-", "no difference"))))
    heading = tag("thead", tag("tr", *(tag("th", each, scope="col") for each in head)))
    table = tag("table", heading, tag("tbody", *rows), class_="settings")
    return scrolled("Settings", table)


def _frontier(done: Sequence[Setting], goal: str) -> Markup:
    places = [
        Place(number, setting.label, setting.estimates()[KL], setting.estimates()[goal])
        for number, setting in enumerate(done)
    ]
    return frontier_chart(
        f"{goal.capitalize()} over KL", places, x_label="KL to the reference, nats"
    )


def _parameter(runs: Sequence[ComparedRun], key: str, title: str) -> Markup:
    measured: dict[str, tuple[object, list[float]]] = {}
    for run in runs:
        value = run.keys.get(key)
        measured.setdefault(shown(value), (value, []))[1].append(run.measures[title])
    groups = list(measured.values())
    if all(is_number(value) for value, _ in groups):
        groups.sort(key=lambda group: float(str(group[0])))
    found: list[Estimate] = [estimate(values) for _, values in groups]
    return parameter_chart(f"{key}: {title}", [value for value, _ in groups], found)


def _importance(shares: Sequence[Shares]) -> Iterator[Markup]:
    """Yield the table of importances; a measure that no key explains has an empty column."""
    keys = list(dict.fromkeys(key for share in shares for key in share.of_parameter))
    if not keys:
        return
    head = tag(
        "tr", tag("th", "key", scope="col"), *(tag("th", s.title, scope="col") for s in shares)
    )
    rows = [
        tag(
            "tr",
            tag("th", key, scope="row"),
            *(_share(each.of_parameter.get(key)) for each in shares),
        )
        for key in keys
    ]
    note = tag(
        "p",
        "The share of each measure's variance that lies between the values of a key, less what "
        "chance gives. The rest is seeds, and keys that act together.",
        class_="note",
    )
    table = tag("table", tag("thead", head), tag("tbody", *rows), class_="settings")
    yield section("Importance", note, scrolled("Importance", table))


def _share(value: float | None) -> Markup:
    return tag("td", "" if value is None else f"{value:.0%}", class_="number")
