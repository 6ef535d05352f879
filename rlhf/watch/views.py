"""What the page shows of a run or a sweep, as texts of HTML and data of charts by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
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
from rlhf.tracking.console import KEY_METRICS
from rlhf.watch.live_run import LiveRun
from rlhf.watch.live_sweep import LiveSweep
from rlhf.watch.progress import short_text, time_text

OTHERS = "All other metrics"
# The parts of the page in their order; those without content are hidden.
REWARD, *PANEL_TITLES = PANELS
PARTS = (
    "status",
    "alarms",
    "Over-optimisation",
    REWARD,
    "answers",
    *PANEL_TITLES,
    "Critic",
    OTHERS,
)


class View(NamedTuple):
    """What a page shows: its title, HTML by part, and the data of charts by section and title."""

    title: str
    parts: Mapping[str, str]
    charts: Mapping[str, Mapping[str, Any]]


class Drawn(NamedTuple):
    """The charts of a run: HTML by section, without data, and the data by section and title."""

    sections: Mapping[str, str]
    data: Mapping[str, Mapping[str, Any]]


def view_run(run: LiveRun, drawn: Drawn, *, back: bool) -> View:
    """Return the view of a run with its charts; ``back`` adds a link to its sweep."""
    progress = run.progress
    parts = {
        "status": _render(
            "status",
            run=run,
            state=progress.state(),
            phases=progress.phases(),
            left=time_text(progress.hours_left()),
            figures=key_figures(run),
            result=progress.result(),
            back=back,
        ),
        "alarms": _render("alarms", alarms=run.alarms, alarm_element_id=alarm_element_id),
        "answers": _render("answers", first=run.first, newest=run.newest),
    }
    name = f"{run.config['name']}, seed {run.config['seed']}"
    title = f"{progress.step_text}, {name}" if progress.phase else name
    return View(title, {**parts, **drawn.sections}, drawn.data)


def draw_charts(run: LiveRun) -> Drawn:
    """Return the charts of a run."""
    sections, data = {}, {}
    for section in _sections(run):
        charts = {f"{section.title}: {each.title}": each for each in section.charts if each}
        shells = [_without_data(key, chart) for key, chart in charts.items()]
        html = _render("section", section=section, charts=shells) if shells else ""
        sections[section.title] = html
        data |= {key: {**each.data, "said": each.said} for key, each in charts.items()}
    return Drawn(sections, data)


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
    return {
        "title": new.title,
        "parts": {k: v for k, v in new.parts.items() if v != before.parts.get(k)},
        "charts": {
            key: {**chart, "lines": _line_changes(before.charts.get(key), chart["lines"])}
            for key, chart in new.charts.items()
            if chart != before.charts.get(key)
        },
    }


def key_figures(run: LiveRun) -> list[tuple[str, str]]:
    """Return the label and the latest value of the key metrics of the run's current phase."""
    found = (
        (metric, run.progress.latest.get(metric.name))
        for metric in KEY_METRICS.get(run.progress.phase or "", ())
    )
    return [
        (metric.label, format(value, metric.format)) for metric, value in found if value is not None
    ]


def _sections(run: LiveRun) -> list[ChartSection]:
    files = run.files(run.curves())
    over_kl = run.files(run.over_kl)
    found = [over_optimisation_section(over_kl)] if "ppo/score_mean" in run.over_kl else []
    others = ChartSection(OTHERS, charts_without_panel(files))
    return [*found, *panel_sections(files), critic_section(files), others]


def _without_data(key: str, chart: Chart) -> Chart:
    """Return ``chart`` with its key instead of its data, which the page gets as it grows."""
    return chart._replace(said=chart.title, note="", data={"key": key})


def _line_changes(
    before: Mapping[str, Any] | None, lines: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Return ``lines`` with ``from``, the number of points that the page has, and those after."""
    old = before["lines"] if before is not None and len(before["lines"]) == len(lines) else []
    return [
        _columns_from(line, _num_equal(line, old[place]) if old else 0)
        for place, line in enumerate(lines)
    ]


def _columns_from(line: Mapping[str, Any], start: int) -> dict[str, Any]:
    return {k: v[start:] if isinstance(v, list) else v for k, v in line.items()} | {"from": start}


def _num_equal(line: Mapping[str, Any], old: Mapping[str, Any]) -> int:
    """Return how many points at the start of two lines are equal, in all columns."""
    columns = [(v, old.get(k, [])) for k, v in line.items() if isinstance(v, list)]
    return min(
        next(
            (i for i, (a, b) in enumerate(zip(new, had, strict=False)) if a != b),
            min(len(new), len(had)),
        )
        for new, had in columns
    )


def _render(macro: str, **values: Any) -> str:
    """Return the HTML of a macro of templates/live.html."""
    return str(getattr(_macros(), macro)(**values)).strip()


@cache
def _macros() -> Any:
    environment = jinja_environment("rlhf.watch")
    environment.globals |= {"time_text": time_text, "short": short_text}
    return environment.get_template("live.html").module
