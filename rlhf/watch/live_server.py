"""Build and serve the live page of a run or sweep: read only new lines, send only changes."""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from http import HTTPStatus
from itertools import takewhile, zip_longest
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple
from urllib.parse import parse_qs

from rlhf.base.errors import RlhfError
from rlhf.config.freeze import FROZEN
from rlhf.report.page import (
    CHART_SCRIPTS,
    LocalRequest,
    LocalServer,
    build_jinja_environment,
    read_asset,
    render_template,
)
from rlhf.report.run_charts import (
    ChartSection,
    alarm_element_id,
    describe_scores,
    other_metric_charts,
    over_optimisation_section,
    panel_sections,
)
from rlhf.report.summary import rank_by_change
from rlhf.run.metric_table import METRICS, PANELS
from rlhf.watch.live_run import LiveRun, LiveSweep
from rlhf.watch.progress import short_number_text, time_text

OTHERS = "All other metrics"  # the title of the last section
MAIN, *PANEL_TITLES = PANELS
# The names of the page's parts in their order; parts without content are hidden.
PARTS = ("status", "alarms", "answers", MAIN, "over KL", *PANEL_TITLES, OTHERS)
LEAST_SECONDS = 1.0  # least time between reads of the files, however many pages are open
MOST_VERSIONS = 10  # views that are kept; a page with an older view gets the whole new view
PACKAGE = "rlhf.watch"
ASSETS = {  # name -> MIME type, files of rlhf.report, file of this package
    "page.css": ("text/css", ("uplot/uPlot.min.css", "report.css"), "watch.css"),
    "page.js": ("text/javascript", CHART_SCRIPTS, "watch.js"),
}


class View(NamedTuple):
    """The content of a page: its title, HTML by part, and charts' data by "SECTION: CHART"."""

    title: str
    parts: Mapping[str, str]
    charts: Mapping[str, Mapping[str, Any]]


def build_run_view(run: LiveRun, before: View | None, *, is_job: bool) -> View:
    """Read what a run has written, and return its view; the view of a job links to its sweep.

    Charts are built only if the run wrote something. Otherwise they come from the view ``before``.
    """
    if run.poll() or before is None:
        sections, charts = _draw_charts(run)
    else:
        sections, charts = before.parts, before.charts
    progress = run.progress
    pairs = [(run.first_answers[key], newest) for key, newest in run.newest_answers.items()]
    parts = {
        "status": _render_macro(
            "status", run=run, verdict=run.headline(), phases=progress.phases(), is_job=is_job
        ),
        "alarms": _render_macro("alarms", alarms=run.alarms, alarm_element_id=alarm_element_id),
        "answers": _render_macro(
            "answers", changed=rank_by_change(pairs), scores=describe_scores(run.as_run_files())
        ),
    }
    title = f"{progress.step_text}, {run.title}" if progress.phase else run.title
    return View(title, {**sections, **parts}, charts)


def _draw_charts(run: LiveRun) -> tuple[Mapping[str, str], Mapping[str, Mapping[str, Any]]]:
    """Return the HTML of sections by part of the page, and the data of charts as in ``View``."""
    sections: dict[str, str] = {}
    data: dict[str, dict[str, Any]] = {}
    for part, section in _sections_by_part(run).items():
        charts = {f"{section.title}: {chart.title}": chart for chart in section.charts if chart}
        # The page fetches the data later: a chart's HTML has a key instead of data.
        shells = [
            chart._replace(description=chart.title, note="", data={"key": key})
            for key, chart in charts.items()
        ]
        is_first = not any(sections.values())
        text = _render_macro("section", section=section, charts=shells, is_open=is_first)
        sections[part] = text if shells else ""
        for key, chart in charts.items():
            data[key] = {**chart.data, "description": chart.description}
    return sections, data


def changes_between(old: View | None, new: View) -> dict[str, Any]:
    """Return the changes from a page's view ``old`` to ``new``; if ``old`` is None, all of ``new``.

    Of a changed line of a chart, only the points from the first changed point on are returned.
    """
    before = old or View("", {}, {})
    charts = {}
    for key, chart in new.charts.items():
        if chart != (old_chart := before.charts.get(key)):
            lines = zip_longest(old_chart["lines"] if old_chart else (), chart["lines"])
            charts[key] = {**chart, "lines": [_changed_points(*pair) for pair in lines]}
    parts = {name: html for name, html in new.parts.items() if html != before.parts.get(name)}
    return {"title": new.title, "parts": parts, "charts": charts}


def _sections_by_part(run: LiveRun) -> dict[str, ChartSection]:
    """Return the report's sections of charts by the part of the page that shows them."""
    files = run.as_run_files()
    sections = {section.title: section for section in panel_sections(files)}
    if "ppo/score_mean" in run.curves:
        sections["over KL"] = over_optimisation_section(files)
    others = ChartSection(OTHERS, other_metric_charts(files))
    return sections | {OTHERS: others}


def _changed_points(old: Mapping[str, Any] | None, line: Mapping[str, Any]) -> dict[str, Any]:
    """Return the chart line ``line`` without those of its first points that ``old`` has too.

    The entry ``from`` of the result is the number of points that were dropped.
    """
    columns = {name: column for name, column in line.items() if isinstance(column, list)}
    old_points = zip(*((old or {}).get(name, ()) for name in columns), strict=False)
    pairs = zip(zip(*columns.values(), strict=True), old_points, strict=False)
    dropped = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
    return {**line, **{name: column[dropped:] for name, column in columns.items()}, "from": dropped}


def _render_macro(macro: str, **values: Any) -> str:
    return str(getattr(_load_macros(), macro)(**values)).strip()


@cache
def _load_macros() -> Any:
    environment = build_jinja_environment("rlhf.watch")
    environment.globals |= {"time_text": time_text, "short": short_number_text, "METRICS": METRICS}
    return environment.get_template("live.html").module


class LiveView:
    """The current view of a run or sweep, updated when a page requests changes."""

    def __init__(self, build_view: Callable[[View | None], View]) -> None:
        self._build_view = build_view
        self._shown: View | None = None  # the last view; None after an error
        self._lock = Lock()
        self._read_at = -LEAST_SECONDS
        self._version = 0
        self._views: deque[tuple[str, View]] = deque(maxlen=MOST_VERSIONS)

    def changes_since(self, version: str) -> dict[str, Any]:
        """Return the newest view's version number, and its changes since the view ``version``."""
        with self._lock:
            if time.monotonic() - self._read_at >= LEAST_SECONDS:
                self._rebuild_view()
                self._read_at = time.monotonic()
            newest, view = self._views[-1]
            return {"version": newest, **changes_between(dict(self._views).get(version), view)}

    def _rebuild_view(self) -> None:
        try:
            self._shown = view = self._build_view(self._shown)
        except RlhfError as error:
            self._shown = None
            fault = _render_macro("fault", message=str(error))
            view = View("cannot be read", {"status": fault}, {})
        if not self._views or view != self._views[-1][1]:
            self._version += 1
            self._views.append((str(self._version), view))


class WatchServer(LocalServer):
    """A server of the live page of the run or sweep in ``folder``.

    Charts also show the curves of the runs ``beside``, as they are when the server starts.

    Raises:
        CheckpointError: if ``folder`` is neither a run nor a sweep.
        ConfigError: if the port is taken or may not be used.
    """

    def __init__(self, folder: Path, port: int | None, beside: Sequence[Path] = ()) -> None:
        self._live_views: dict[str, LiveView] = {}
        self._lock = Lock()
        self._beside = beside
        if (folder / FROZEN).is_file():
            self._sweep = None
            run = LiveRun(folder, beside)
            self._live_views[""] = LiveView(partial(build_run_view, run, is_job=False))
        else:
            self._sweep = LiveSweep(folder)
            self._live_views[""] = LiveView(self._build_sweep_view)
        super().__init__(_WatchRequest, port)
        self.address += "/"

    def _build_sweep_view(self, _: View | None) -> View:
        assert self._sweep is not None
        self._sweep.poll()
        jobs = _render_macro("jobs", sweep=self._sweep)
        return View(self._sweep.headline, {"status": jobs}, {})

    def get_or_create_view(self, job: str) -> LiveView | None:
        """Return the view of ``job``, or of the page itself for ""; None if the job is unknown."""
        with self._lock:
            if job not in self._live_views and self._sweep is not None:
                folder = self._sweep.job_folder(job)
                if folder is not None:
                    # Opened at the first request, so that the job's page shows its errors.
                    opened = cache(partial(LiveRun, folder, self._beside))
                    self._live_views[job] = LiveView(
                        lambda before: build_run_view(opened(), before, is_job=True)
                    )
            return self._live_views.get(job)


class _WatchRequest(LocalRequest):
    """A request for the empty page, for its style sheet or script, or for changes."""

    server: WatchServer
    policy = (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )

    def do_GET(self) -> None:
        address, _, query = self.path.partition("?")
        path, _, name = address.rpartition("/")
        if (refused := self.refusal_status(path)) is not None:
            self._send_refusal(refused)
        elif name in ASSETS:
            mime_type, report_files, own_file = ASSETS[name]
            texts = [*map(read_asset, report_files), read_asset(own_file, PACKAGE)]
            self.send(HTTPStatus.OK, "\n".join(texts), mime_type=mime_type)
        elif name == "updates":
            self._send_updates({key: values[0] for key, values in parse_qs(query).items()})
        elif not name:
            values = {"path": self.server.path, "parts": PARTS, "main": MAIN}
            self.send(HTTPStatus.OK, render_template("shell.html", package=PACKAGE, **values))
        else:
            self._send_refusal(HTTPStatus.NOT_FOUND)

    def _send_updates(self, query: dict[str, str]) -> None:
        view = self.server.get_or_create_view(query.get("run", ""))
        if view is None:
            self._send_refusal(HTTPStatus.NOT_FOUND)
        else:
            changes = json.dumps(view.changes_since(query.get("since", "")), allow_nan=False)
            self.send(HTTPStatus.OK, changes, mime_type="application/json")

    def _send_refusal(self, status: HTTPStatus) -> None:
        self.send(status, f"{status.value} {status.phrase}\n", mime_type="text/plain")
