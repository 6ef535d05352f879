"""Line charts as SVG text, without a library: small, and readable in black and white."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from rlhf.tracking.report.markup import Markup, tag

WIDTH, HEIGHT = 520, 240
LEFT, RIGHT, TOP, BOTTOM = 58, 14, 12, 34  # margins around the plot area
INNER = WIDTH - RIGHT - LEFT
MOST_DOTS = 40  # points that are also drawn as dots
MOST_POINTS = 600  # per line; longer lines keep the extremes of each bucket
MOST_TICKS = 6

Point = tuple[float, float]


class Line(NamedTuple):
    """A line with its label; ``half`` are half-widths of intervals, one per point, or empty."""

    label: str
    points: Sequence[Point]
    half: Sequence[float] = ()
    is_joined: bool = True  # False: only dots


class Flag(NamedTuple):
    """A mark at an x value, with its text and the id on the page that it links to."""

    x: float
    text: str
    target: str


class Tick(NamedTuple):
    """A place on an axis and its label."""

    at: float
    label: str


class Scale(NamedTuple):
    """A linear map from values to pixels."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        """Return the pixel of ``value``."""
        share = (value - self.low) / (self.high - self.low)
        return self.start + share * (self.end - self.start)


def line_chart(
    title: str,
    lines: Sequence[Line],
    *,
    x_label: str = "step",
    x_ticks: Sequence[Tick] | None = None,
    unit: str = "",
    healthy: tuple[float, float] | None = None,
    flags: Sequence[Flag] = (),
) -> Markup:
    """Return a figure with up to four lines; ``healthy`` shades a range of y values.

    Points that are not finite are left out. ``x_ticks`` replaces the round values below the x axis.
    The text for screen readers gives the first and last value of every line.
    """
    lines = [_finite(line) for line in lines]
    points = [point for line in lines for point in line.points]
    if not points:
        return Markup()
    ends = [v + s * half for line in lines for (_, v), half in _halves(line) for s in (-1, 1)]
    x, y = plot_area([at for at, _ in points], [value for _, value in points] + ends)
    shown = [line for line in lines if line.points]
    said = "; ".join(
        f"{line.label} from {number(line.points[0][1])} to {number(line.points[-1][1])}"
        for line in shown
    )
    keys = [tag("span", line.label, class_=f"key s{i}") for i, line in enumerate(shown)]
    legend = keys if len(keys) > 1 else []
    drawing = drawn(
        f"{title}: {said}",
        *_band(healthy, y),
        *axes(x, y, x_label, x_ticks),
        *(part for index, line in enumerate(shown) for part in _line(line, index, x, y)),
        *(_flag(flag, x) for flag in flags),
        role="group" if flags else "img",  # an image has nothing to click on
    )
    caption = tag("figcaption", title, " ", tag("span", unit, class_="unit"), *legend)
    return tag("figure", caption, drawing)


def plot_area(xs: Sequence[float], ys: Sequence[float]) -> tuple[Scale, Scale]:
    """Return the scales of a chart that shows the values ``xs`` and ``ys`` with a margin."""
    x = Scale(*_range(xs), LEFT, WIDTH - RIGHT)
    return x, Scale(*_range(ys), HEIGHT - BOTTOM, TOP)


def drawn(said: str, *parts: Markup, width: int = WIDTH, role: str = "img") -> Markup:
    """Return a drawing with its text for screen readers."""
    return tag("svg", *parts, viewBox=f"0 0 {width} {HEIGHT}", role=role, aria_label=said)


def number(value: float) -> str:
    """Return a value in few characters."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    return f"{value:.3g}" if 1e-3 <= abs(value) < 1e5 else f"{value:.1e}"  # noqa: PLR2004


def thinned(points: Sequence[Point]) -> list[Point]:
    """Return at most ``MOST_POINTS`` points: the lowest and the highest of each bucket."""
    if len(points) <= MOST_POINTS:
        return list(points)
    size = math.ceil(2 * len(points) / MOST_POINTS)
    kept: list[Point] = []
    for start in range(0, len(points), size):
        bucket = points[start : start + size]
        kept += sorted({min(bucket, key=lambda p: p[1]), max(bucket, key=lambda p: p[1])})
    return kept


def ticks(low: float, high: float) -> list[float]:
    """Return three to six round values between ``low`` and ``high``."""
    raw = (high - low) / MOST_TICKS
    power = 10 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw)
    first = math.ceil(low / step)
    return [step * n for n in range(first, math.floor(high / step) + 1)]


def _finite(line: Line) -> Line:
    pairs = list(zip(line.points, line.half or [0.0] * len(line.points), strict=True))
    kept = [(point, half) for point, half in pairs if math.isfinite(point[1])]
    halves = [half for _, half in kept] if line.half else ()
    return line._replace(points=[point for point, _ in kept], half=halves)


def _halves(line: Line) -> Iterator[tuple[Point, float]]:
    return zip(line.points, line.half, strict=False)


def _range(values: Sequence[float]) -> tuple[float, float]:
    low, high = min(values), max(values)
    margin = 0.05 * (high - low) or abs(high) * 0.1 or 1.0
    return low - margin, high + margin


def _band(healthy: tuple[float, float] | None, y: Scale) -> Iterator[Markup]:
    if healthy is None:
        return
    low, high = max(healthy[0], y.low), min(healthy[1], y.high)
    if low < high:
        height = y(low) - y(high)
        yield tag("rect", class_="healthy", x=LEFT, y=y(high), width=INNER, height=height)


def axes(
    x: Scale, y: Scale, x_label: str, x_ticks: Sequence[Tick] | None = None
) -> Iterator[Markup]:
    """Yield grid lines and labels; ``x_ticks`` replaces the round values below the x axis."""
    for value in ticks(y.low, y.high):
        yield tag("path", class_="grid", d=f"M{LEFT} {y(value):.1f}h{INNER}")
        yield tag("text", number(value), x=LEFT - 6, y=y(value) + 4, text_anchor="end")
    if x_ticks is None:
        x_ticks = [Tick(value, number(value)) for value in ticks(x.low, x.high)]
    for at, label in x_ticks:
        yield tag("text", label, x=x(at), y=HEIGHT - 16, text_anchor="middle")
    yield tag("text", x_label, x=LEFT + INNER / 2, y=HEIGHT - 2, text_anchor="middle")


def _line(line: Line, index: int, x: Scale, y: Scale) -> Iterator[Markup]:
    for (at, value), half in _halves(line):
        ends = f"M{x(at):.1f} {y(value - half):.1f}V{y(value + half):.1f}"
        yield tag("path", class_=f"half s{index}", d=ends)
    if line.is_joined:
        points = " ".join(f"{x(at):.1f},{y(value):.1f}" for at, value in thinned(line.points))
        yield tag("polyline", class_=f"line s{index}", points=points)
    for at, value in line.points if len(line.points) <= MOST_DOTS or not line.is_joined else ():
        yield tag("circle", class_=f"dot s{index}", cx=x(at), cy=y(value), r=2.5)


def _flag(flag: Flag, x: Scale) -> Markup:
    bottom, height = HEIGHT - BOTTOM, HEIGHT - BOTTOM - TOP
    mark = tag("path", class_="flag", d=f"M{x(flag.x):.1f} {bottom}v{-height}l9 5l-9 5")
    return tag("a", tag("title", flag.text), mark, href=f"#{flag.target}", aria_label=flag.text)
