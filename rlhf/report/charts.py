"""Charts as data: ``charts.js`` draws them with uPlot, templates write what they say in words."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import compress
from typing import Any, NamedTuple

MOST_POINTS = 600  # per line; longer lines keep the extremes of each bucket
DIGITS = 6  # of a value, more than a screen can show

Point = tuple[float, float]


class Line(NamedTuple):
    """A line with its label; ``half`` and ``x_half`` are half-widths of intervals, or empty."""

    label: str
    points: Sequence[Point]
    half: Sequence[float] = ()
    is_joined: bool = True  # False: only dots
    x_half: Sequence[float] = ()
    names: Sequence[str] = ()  # of the points, shown instead of their x values
    settings: Sequence[int] = ()  # of a sweep: numbers from 0, drawn beside the points


class Flag(NamedTuple):
    """A mark at an x value, with its text and the id on the page that it links to."""

    x: float
    text: str
    target: str


class Tick(NamedTuple):
    """A place on an axis and its label."""

    at: float
    label: str


class Chart(NamedTuple):
    """A chart: its words, and the data that the page's script draws."""

    title: str
    said: str
    unit: str
    labels: Sequence[str]
    flags: Sequence[Flag]
    note: str
    data: dict[str, Any]


def line_chart(
    title: str,
    lines: Sequence[Line],
    *,
    x_label: str = "step",
    x_ticks: Sequence[Tick] | None = None,
    unit: str = "",
    healthy: tuple[float, float] | None = None,
    flags: Sequence[Flag] = (),
) -> Chart | None:
    """Return a chart of up to four lines, or None if no point is finite.

    Points that are not finite are dropped. ``healthy`` shades a range of y values. ``x_ticks``
    replaces the round values below the x axis. ``said`` has the first and last value of every line.
    """
    shown = [finite for line in lines if (finite := _finite(line)).points]
    if not shown:
        return None
    said = "; ".join(
        f"{line.label} from {number_text(line.points[0][1])} to {number_text(line.points[-1][1])}"
        for line in shown
    )
    longest = max(len(line.points) for line in shown)
    note = (
        f"Of {longest:,} points the lowest and the highest of each bucket are drawn."
        if longest > MOST_POINTS
        else ""
    )
    return Chart(
        title,
        f"{title}: {said}",
        unit,
        [line.label for line in shown],
        flags,
        note,
        {
            "xLabel": x_label,
            "ticks": x_ticks,
            "healthy": _band(healthy, [y for line in shown for _, y in line.points]),
            "flags": [flag.x for flag in flags],
            "lines": [_line_data(line) for line in shown],
        },
    )


def number_text(value: float) -> str:
    """Return a value in few characters."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    return f"{value:.3g}" if 1e-3 <= abs(value) < 1e5 else f"{value:.1e}"  # noqa: PLR2004


def thin_points(points: Sequence[Point]) -> list[Point]:
    """Return at most ``MOST_POINTS`` points: the lowest and the highest of each bucket."""
    if len(points) <= MOST_POINTS:
        return list(points)
    size = math.ceil(2 * len(points) / MOST_POINTS)
    kept: list[Point] = []
    for start in range(0, len(points), size):
        bucket = points[start : start + size]
        kept += sorted({min(bucket, key=lambda p: p[1]), max(bucket, key=lambda p: p[1])})
    return kept


def _finite(line: Line) -> Line:
    kept = [math.isfinite(y) for _, y in line.points]
    return Line(
        line.label,
        list(compress(line.points, kept)),
        list(compress(line.half, kept)),
        line.is_joined,
        list(compress(line.x_half, kept)),
        list(compress(line.names, kept)),
        list(compress(line.settings, kept)),
    )


def _line_data(line: Line) -> dict[str, Any]:
    """Return the data of a line; columns that it does not have are left out."""
    points = line.points if line.half or line.names else thin_points(line.points)
    columns = {
        "x": _round(x for x, _ in points),
        "y": _round(y for _, y in points),
        "half": _round(line.half),
        "xHalf": _round(line.x_half),
        "names": line.names,
        "settings": line.settings,
    }
    return {"label": line.label, "joined": line.is_joined} | {k: v for k, v in columns.items() if v}


def _round(values: Iterable[float]) -> list[float]:
    return [float(f"{value:.{DIGITS}g}") if value % 1 else int(value) for value in values]


def _band(healthy: tuple[float, float] | None, ys: Sequence[float]) -> Point | None:
    """Return the part of the healthy range that the chart shows, or None."""
    if healthy is None:
        return None
    least, most = min(ys), max(ys)
    margin = 0.05 * (most - least) or 0.1 * abs(most) or 1.0  # as in charts.js
    low, high = max(healthy[0], least - margin), min(healthy[1], most + margin)
    return (low, high) if low < high else None
