"""Build charts as data, which ``charts.js`` draws with uPlot, and as a text for screen readers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import compress
from typing import Any, NamedTuple

MOST_POINTS = 600  # points per line; longer lines keep the extremes of each bucket
DIGITS = 6  # significant digits of a value, more than a screen can show

Point = tuple[float, float]


class Line(NamedTuple):
    """A line of a chart; ``half`` and ``x_half`` are half-widths of intervals in y and x."""

    label: str
    points: Sequence[Point]
    half: Sequence[float] = ()
    is_joined: bool = True  # False: draw dots without a line
    x_half: Sequence[float] = ()
    names: Sequence[str] = ()  # a name per point, shown instead of its x value
    settings: Sequence[int] = ()  # in a sweep, the setting's number (from 0) per point


class Flag(NamedTuple):
    """A mark at an x value, with its text and the id of the page element that it links to."""

    x: float
    text: str
    target: str


class Tick(NamedTuple):
    """A position on an axis, and its label."""

    at: float
    label: str


class Chart(NamedTuple):
    """A chart: its texts (``said`` is for screen readers), and the data that the script draws."""

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

    Points that are not finite are dropped. ``healthy`` is a range of y values to shade. ``x_ticks``
    replace the default ticks of the x axis. ``Chart.said`` names each line's first and last value.
    """
    shown = [finite for line in lines if (finite := _drop_non_finite(line)).points]
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
            "healthy": _visible_band(healthy, [y for line in shown for _, y in line.points]),
            "flags": [flag.x for flag in flags],
            "lines": [_line_data(line) for line in shown],
        },
    )


def number_text(value: float) -> str:
    """Return a number as text with three significant digits."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    return f"{value:.3g}" if 1e-3 <= abs(value) < 1e5 else f"{value:.1e}"  # noqa: PLR2004


def thin_points(points: Sequence[Point]) -> list[Point]:
    """Return at most ``MOST_POINTS`` points: the lowest and the highest point of each bucket."""
    if len(points) <= MOST_POINTS:
        return list(points)
    size = math.ceil(2 * len(points) / MOST_POINTS)
    kept: list[Point] = []
    for start in range(0, len(points), size):
        bucket = points[start : start + size]
        kept += sorted({min(bucket, key=lambda p: p[1]), max(bucket, key=lambda p: p[1])})
    return kept


def _drop_non_finite(line: Line) -> Line:
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
    """Return the data of a line for charts.js, without empty columns."""
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


def _visible_band(healthy: tuple[float, float] | None, ys: Sequence[float]) -> Point | None:
    """Return the part of the healthy range that lies within the y axis, or None."""
    if healthy is None:
        return None
    least, most = min(ys), max(ys)
    margin = 0.05 * (most - least) or 0.1 * abs(most) or 1.0  # as in charts.js
    low, high = max(healthy[0], least - margin), min(healthy[1], most + margin)
    return (low, high) if low < high else None
