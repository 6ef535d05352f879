"""Serve the live page of a run or of a sweep: only what has changed is read and sent."""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable
from functools import cache, partial
from http import HTTPStatus
from pathlib import Path
from threading import Lock
from typing import Any
from urllib.parse import parse_qs

from rlhf.base.errors import RlhfError
from rlhf.config.freeze import FROZEN
from rlhf.report.page import CHART_SCRIPTS, LocalRequest, LocalServer, read_asset, render_template
from rlhf.watch.live_run import LiveRun, LiveSweep
from rlhf.watch.views import (
    PARTS,
    DrawnCharts,
    View,
    changes,
    draw_charts,
    view_fault,
    view_run,
    view_sweep,
)

LEAST_SECONDS = 1.0  # between two reads of the files, however many pages are open
MOST_VERSIONS = 10  # earlier views that are kept; a page that has an older one gets everything
ROOM = "rlhf.watch"
ASSETS = {
    "page.css": ("text/css", ("uplot/uPlot.min.css", "report.css"), "watch.css"),
    "page.js": ("text/javascript", CHART_SCRIPTS, "watch.js"),
}


class Follower:
    """The view of a run or of a sweep, renewed when a page asks for it."""

    def __init__(self, view: Callable[[], View]) -> None:
        self._view = view
        self._lock = Lock()
        self._read_at = -LEAST_SECONDS
        self._version = 0
        self._views: deque[tuple[str, View]] = deque(maxlen=MOST_VERSIONS)

    def changes_since(self, version: str) -> dict[str, Any]:
        """Return what has changed since the view called ``version``."""
        with self._lock:
            if time.monotonic() - self._read_at >= LEAST_SECONDS:
                self._renew()
                self._read_at = time.monotonic()
            newest, view = self._views[-1]
            return {"version": newest, **changes(dict(self._views).get(version), view)}

    def _renew(self) -> None:
        try:
            view = self._view()
        except RlhfError as error:
            view = view_fault(str(error))
        if not self._views or view != self._views[-1][1]:
            self._version += 1
            self._views.append((str(self._version), view))


class WatchServer(LocalServer):
    """A server of the live page of the run or sweep in ``folder``.

    Raises:
        CheckpointError: if ``folder`` is neither.
        ConfigError: if the port is taken or may not be used.
    """

    def __init__(self, folder: Path, port: int | None) -> None:
        self._followers: dict[str, Follower] = {}
        self._lock = Lock()
        if (folder / FROZEN).is_file():
            self._sweep = None
            run = LiveRun(folder)
            self._followers[""] = follow_run(lambda: run, back=False)
        else:
            self._sweep = LiveSweep(folder)
            self._followers[""] = Follower(self._view_sweep)
        super().__init__(_WatchRequest, port)
        self.address += "/"

    def _view_sweep(self) -> View:
        assert self._sweep is not None
        self._sweep.poll()
        return view_sweep(self._sweep)

    def follower(self, job: str) -> Follower | None:
        """Return the follower of the job of a sweep, or of the page itself ("")."""
        with self._lock:
            if job not in self._followers and self._sweep is not None:
                folder = self._sweep.job_folder(job)
                if folder is not None:
                    self._followers[job] = follow_run(cache(partial(LiveRun, folder)), back=True)
            return self._followers.get(job)


def follow_run(opened: Callable[[], LiveRun], *, back: bool) -> Follower:
    """Return a follower of the run that ``opened`` returns; ``back`` adds a link to its sweep."""
    # The charts, which are made only if the run has written something.
    drawn: list[DrawnCharts] = []

    def view() -> View:
        run = opened()
        if run.poll() or not drawn:
            drawn[:] = [draw_charts(run)]
        return view_run(run, drawn[0], back=back)

    return Follower(view)


class _WatchRequest(LocalRequest):
    """A request: the empty page, its style or script, or what has changed."""

    server: WatchServer
    policy = (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )

    def do_GET(self) -> None:
        place, _, query = self.path.partition("?")
        path, _, name = place.rpartition("/")
        if (refused := self.refusal(path)) is not None:
            self._refuse(refused)
        elif name in ASSETS:
            kind, shared, own = ASSETS[name]
            texts = [*map(read_asset, shared), read_asset(own, ROOM)]
            self.send(HTTPStatus.OK, "\n".join(texts), kind=kind)
        elif name == "updates":
            self._send_updates({key: values[0] for key, values in parse_qs(query).items()})
        elif not name:
            page = render_template("shell.html", package=ROOM, path=self.server.path, parts=PARTS)
            self.send(HTTPStatus.OK, page)
        else:
            self._refuse(HTTPStatus.NOT_FOUND)

    def _send_updates(self, asked: dict[str, str]) -> None:
        follower = self.server.follower(asked.get("run", ""))
        if follower is None:
            self._refuse(HTTPStatus.NOT_FOUND)
        else:
            found = json.dumps(follower.changes_since(asked.get("since", "")), allow_nan=False)
            self.send(HTTPStatus.OK, found, kind="application/json")

    def _refuse(self, status: HTTPStatus) -> None:
        self.send(status, f"{status.value} {status.phrase}\n", kind="text/plain")
