"""Charts of a sweep: frontiers, one parameter against one measure, and parallel coordinates.

Parts that belong to one setting have ``data-setting``, by which the page's script marks them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple, TypeGuard

from rlhf.intervals import Estimate
from rlhf.tracking.comparison import shown
from rlhf.tracking.report.charts import (
    BOTTOM,
    HEIGHT,
    TOP,
    Line,
    Scale,
    Tick,
    axes,
    drawn,
    line_chart,
    number,
    plot_area,
)
from rlhf.tracking.report.markup import Markup, tag

MOST_MARKS = 5  # values of a parameter that all get a mark on their axis
WIDE_RATIO = 10  # parameters that span more than this are drawn over their logarithm
LINE_HEIGHT = 14  # of labels
AXIS_WIDTH = 150  # between two axes of parallel coordinates
AXIS_ENDS = (HEIGHT - BOTTOM, TOP + 26)  # bottom and top of an axis


class Place(NamedTuple):
    """A setting in a frontier: its number on the page, its label, and two measures."""

    setting: int
    label: str
    x: Estimate
    y: Estimate


class Axis(NamedTuple):
    """An axis of parallel coordinates: a value per setting, or None where it has none."""

    title: str
    values: Sequence[object]


def frontier_chart(title: str, places: Sequence[Place], *, x_label: str) -> Markup:
    """Return a figure of one measure over another, both with 95 % intervals.

    A line joins the settings that no other setting beats: none has a higher y for a lower x.
    """
    xs = [v for place in places for v in _ends(place.x)]
    ys = [v for place in places for v in _ends(place.y)]
    x, y = plot_area(xs, ys)
    best = frontier(places)
    line = " ".join(f"{x(place.x.mean):.1f},{y(place.y.mean):.1f}" for place in best)
    names = ", ".join(place.label for place in best)
    return tag(
        "figure",
        tag("figcaption", title),
        drawn(
            f"{title}: on the frontier are {names}",
            *axes(x, y, x_label),
            tag("polyline", class_="line s0", points=line),
            *(part for place in places for part in _place(place, x, y)),
        ),
    )


def frontier(places: Sequence[Place]) -> list[Place]:
    """Return the places that no other place beats in both means, by rising x."""
    kept: list[Place] = []
    for place in sorted(places, key=lambda each: (each.x.mean, -each.y.mean)):
        if not kept or place.y.mean > kept[-1].y.mean:
            kept.append(place)
    return kept


def parameter_chart(title: str, values: Sequence[object], found: Sequence[Estimate]) -> Markup:
    """Return a figure of a measure over the values of a parameter, with 95 % intervals.

    Values that are not numbers are drawn at equal distances. If every value was tried once, as in a
    search, the values are not joined.
    """
    numbers = [float(value) for value in values if is_number(value)]
    if len(numbers) < len(values):
        places = [float(index) for index in range(len(values))]
        x_ticks: list[Tick] | None = [
            Tick(at, shown(value)) for at, value in zip(places, values, strict=True)
        ]
    else:
        place = math.log10 if _spans_decades(numbers) else float
        places = [place(each) for each in numbers]
        marks = numbers if len(numbers) <= MOST_MARKS else _powers(numbers)
        x_ticks = [Tick(place(each), number(each)) for each in marks] or None
    halves = [0.0 if math.isnan(each.half) else each.half for each in found]
    points = [(at, each.mean) for at, each in zip(places, found, strict=True)]
    is_joined = len(values) <= MOST_MARKS or any(each.size > 1 for each in found)
    parameter, _, measure = title.partition(": ")
    line = Line(measure, points, halves, is_joined)
    return line_chart(title, [line], x_label=parameter, x_ticks=x_ticks)


def parallel_chart(title: str, columns: Sequence[Axis], ranks: Sequence[float]) -> Markup:
    """Return a figure with a line per setting through its values on every axis.

    ``ranks`` are 0 for the worst setting and 1 for the best: it is drawn thick, and in another
    colour.
    """
    scales = [_axis_places(column.values) for column in columns]
    width = AXIS_WIDTH * len(columns)
    parts = [part for i, (_, marks) in enumerate(scales) for part in _axis(columns[i], i, marks)]
    for setting, rank in sorted(enumerate(ranks), key=lambda each: each[1]):
        places = [(index, heights[setting]) for index, (heights, _) in enumerate(scales)]
        points = " ".join(f"{_across(i):.1f},{at:.1f}" for i, at in places if at is not None)
        lane = {"style": f"--rank:{rank:.2f}", "data-setting": setting}
        parts.append(tag("polyline", class_="lane", points=points, **lane))
    said = f"{title}: {len(ranks)} settings over {', '.join(column.title for column in columns)}"
    svg = drawn(said, *parts, width=width)
    wide = tag("div", svg, style=f"min-width:{width * 0.8:.0f}px;max-width:{width}px")
    scroll = tag("div", wide, class_="scroll", tabindex=0, role="region", aria_label=title)
    return tag("figure", tag("figcaption", title), scroll)


def is_number(value: object) -> TypeGuard[int | float]:
    """Return True if ``value`` is a number, and no truth value."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def _ends(found: Estimate) -> tuple[float, float]:
    return (found.mean, found.mean) if math.isnan(found.half) else (found.low, found.high)


def _place(place: Place, x: Scale, y: Scale) -> Iterator[Markup]:
    mine = {"data-setting": place.setting}
    at, height = x(place.x.mean), y(place.y.mean)
    left, right = (x(value) for value in _ends(place.x))
    low, high = (y(value) for value in _ends(place.y))
    cross = f"M{left:.1f} {height:.1f}H{right:.1f}M{at:.1f} {low:.1f}V{high:.1f}"
    yield tag("path", class_="half s0", d=cross, **mine)
    name = tag("title", f"{place.label}: {number(place.y.mean)} at {number(place.x.mean)}")
    yield tag("circle", name, class_="dot s0", cx=at, cy=height, r=4, **mine)
    yield tag("text", str(place.setting + 1), x=at + 6, y=height - 6, **mine)


def _axis_places(values: Sequence[object]) -> tuple[list[float | None], list[Tick]]:
    """Return the height of every value on its axis, and the labels of the axis."""
    known = [float(value) for value in values if is_number(value)]
    if not known or any(value is not None and not is_number(value) for value in values):
        names = list(dict.fromkeys(map(shown, values)))
        scale = Scale(-0.5, len(names) - 0.5, *AXIS_ENDS)
        labels = [Tick(scale(index), name) for index, name in enumerate(names)]
        return [scale(names.index(shown(value))) for value in values], labels
    place = math.log10 if _spans_decades(known) else float
    low, high = place(min(known)), place(max(known))
    scale = Scale(low - (low == high), high + (low == high), *AXIS_ENDS)
    distinct = sorted(set(known))
    marks = distinct if len(distinct) <= MOST_MARKS else [distinct[0], distinct[-1]]
    labels = [Tick(scale(place(value)), number(value)) for value in marks]
    return [scale(place(v)) if is_number(v) else None for v in values], labels


def _spans_decades(values: Sequence[float]) -> bool:
    return min(values) > 0 and max(values) > WIDE_RATIO * min(values)


def _powers(values: Sequence[float]) -> list[float]:
    """Return the powers of ten among values that span decades; none of other values."""
    if not _spans_decades(values):
        return []
    lowest, highest = math.ceil(math.log10(min(values))), math.floor(math.log10(max(values)))
    return [10.0**power for power in range(lowest, highest + 1)]


def _axis(column: Axis, index: int, marks: Sequence[Tick]) -> Iterator[Markup]:
    at = _across(index)
    yield tag("path", class_="grid", d=f"M{at:.1f} {AXIS_ENDS[0]}V{AXIS_ENDS[1]}")
    yield tag("text", column.title, x=at, y=TOP + 12, text_anchor="middle", class_="title")
    for height, label in _spaced(marks):
        yield tag("text", label, x=at - 6, y=height + 4, text_anchor="end")


def _spaced(marks: Sequence[Tick]) -> list[Tick]:
    """Return the marks of an axis without those whose labels would touch another."""
    kept: list[Tick] = []
    for mark in sorted(marks):
        if not kept or mark.at - kept[-1].at >= LINE_HEIGHT:
            kept.append(mark)
    return kept


def _across(index: int) -> float:
    return AXIS_WIDTH * (index + 0.5)
