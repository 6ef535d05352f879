"""What the page shows of a run or a sweep, as texts of HTML and data of charts by name."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from itertools import takewhile, zip_longest
from typing import Any, NamedTuple

from rlhf.report.charts import Chart
from rlhf.report.page import jinja_environment
from rlhf.report.panels import PANELS
from rlhf.report.run_charts import (
    ChartSection,
    alarm_element_id,
    charts_without_panel,
    critic_section,
    over_optimisation_section,
    panel_sections,
)
from rlhf.watch.live_run import LiveRun, LiveSweep
from rlhf.watch.progress import short_text, time_text

OTHERS = "All other metrics"
# The parts of the page in their order; those without content are hidden.
REWARD, *PANEL_TITLES = PANELS
PARTS = ("status", "alarms", "over KL", REWARD, "answers", *PANEL_TITLES, "critic", OTHERS)


class View(NamedTuple):
    """What a page shows: its title, HTML by part, and the data of charts by section and title."""

    title: str
    parts: Mapping[str, str]
    charts: Mapping[str, Mapping[str, Any]]


class DrawnCharts(NamedTuple):
    """The charts of a run: HTML by section, without data, and the data by section and title."""

    sections: Mapping[str, str]
    data: Mapping[str, Mapping[str, Any]]


def view_run(run: LiveRun, drawn: DrawnCharts, *, back: bool) -> View:
    """Return the view of a run with its charts; ``back`` adds a link to its sweep."""
    progress = run.progress
    parts = {
        "status": _render(
            "status", run=run, headline=run.headline(), phases=progress.phases(), back=back
        ),
        "alarms": _render("alarms", alarms=run.alarms, alarm_element_id=alarm_element_id),
        "answers": _render("answers", first=run.first, newest=run.newest),
    }
    name = f"{run.config['name']}, seed {run.config['seed']}"
    title = f"{progress.step_text}, {name}" if progress.phase else name
    return View(title, {**parts, **drawn.sections}, drawn.data)


def draw_charts(run: LiveRun) -> DrawnCharts:
    """Return the charts of a run."""
    sections: dict[str, str] = {}
    data: dict[str, dict[str, Any]] = {}
    for part, section in _sections(run).items():
        charts = {f"{section.title}: {each.title}": each for each in section.charts if each}
        shells = [_without_data(key, chart) for key, chart in charts.items()]
        sections[part] = _render("section", section=section, charts=shells) if shells else ""
        data |= {key: {**each.data, "said": each.said} for key, each in charts.items()}
    return DrawnCharts(sections, data)


def view_sweep(sweep: LiveSweep) -> View:
    """Return the view of a sweep: a row per job."""
    return View(sweep.headline, {"status": _render("jobs", sweep=sweep)}, {})


def view_fault(message: str) -> View:
    """Return the view of files that cannot be read."""
    return View("cannot be read", {"status": _render("fault", message=message)}, {})


def changes(old: View | None, new: View) -> dict[str, Any]:
    """Return what turns ``old``, which a page shows, into ``new``; None: all of ``new``.

    A line has only its points from the first that differs on.
    """
    before = old or View("", {}, {})
    charts = {}
    for key, chart in new.charts.items():
        if chart != (had := before.charts.get(key)):
            lines = zip_longest(had["lines"] if had else (), chart["lines"])
            charts[key] = {**chart, "lines": [_new_points(*pair) for pair in lines]}
    parts = {name: html for name, html in new.parts.items() if html != before.parts.get(name)}
    return {"title": new.title, "parts": parts, "charts": charts}


def _sections(run: LiveRun) -> dict[str, ChartSection]:
    """Return the sections of the report by the part of the page that shows them."""
    files = run.files(run.curves())
    found = {section.title: section for section in panel_sections(files)}
    if "ppo/score_mean" in run.over_kl:
        found["over KL"] = over_optimisation_section(run.files(run.over_kl))
    others = ChartSection(OTHERS, charts_without_panel(files))
    return found | {"critic": critic_section(files), OTHERS: others}


def _without_data(key: str, chart: Chart) -> Chart:
    """Return ``chart`` with its key instead of its data, which the page gets as it grows."""
    return chart._replace(said=chart.title, note="", data={"key": key})


def _new_points(old: Mapping[str, Any] | None, line: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``line`` without its first points that ``old`` has too; their number is ``from``."""
    columns = {name: column for name, column in line.items() if isinstance(column, list)}
    had = zip(*((old or {}).get(name, ()) for name in columns), strict=False)
    pairs = zip(zip(*columns.values(), strict=True), had, strict=False)
    same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
    return {**line, **{name: column[same:] for name, column in columns.items()}, "from": same}


def _render(macro: str, **values: Any) -> str:
    """Return the HTML of a macro of templates/live.html."""
    return str(getattr(_macros(), macro)(**values)).strip()


@cache
def _macros() -> Any:
    environment = jinja_environment("rlhf.watch")
    environment.globals |= {"time_text": time_text, "short": short_text}
    return environment.get_template("live.html").module
