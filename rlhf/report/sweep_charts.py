"""Charts of a sweep: frontiers, one parameter against one measure, and parallel coordinates.

Parts that belong to one setting have its number, by which the page's script marks them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple, TypeGuard

from rlhf.base.intervals import Estimate
from rlhf.report.charts import Chart, Line, Tick, line_chart, number_text
from rlhf.report.comparison import as_typed, cell

MOST_MARKS = 5  # values of a parameter that all get a mark on their axis
WIDE_RATIO = 10  # parameters that span more than this are drawn over their logarithm
LINE_HEIGHT = 16  # of labels, in pixels
CHARACTER = 7  # width of a title's letter, in pixels
AXIS_WIDTH = 130  # between two axes of parallel coordinates, at least
AXIS_ENDS = (230, 44)  # bottom and top of an axis


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


class DrawnAxis(NamedTuple):
    """An axis on the page: its x, its labels at their heights, and the height of each setting."""

    title: str
    x: int
    marks: Sequence[Tick]
    heights: Sequence[float | None]


class Lane(NamedTuple):
    """The line of a setting through the axes; ``rank`` is 0 for the worst and 1 for the best."""

    setting: int
    rank: float
    points: str
    said: str


class ParallelChart(NamedTuple):
    """Parallel coordinates, which uPlot does not have: a template draws them as SVG."""

    said: str
    width: int
    axes: Sequence[DrawnAxis]
    lanes: Sequence[Lane]


def frontier_chart(title: str, places: Sequence[Place], *, x_label: str) -> Chart | None:
    """Return a chart of one measure over another, both with 95 % intervals.

    A line joins the settings that no other setting beats: none has a higher y for a lower x.
    """
    best = frontier(places)
    lines = [
        Line("frontier", [(each.x.mean, each.y.mean) for each in best]),
        Line(
            "settings",
            [(each.x.mean, each.y.mean) for each in places],
            half=[_half(each.y) for each in places],
            x_half=[_half(each.x) for each in places],
            is_joined=False,
            names=[
                f"{each.setting + 1}: {each.label}, {x_label} {cell(each.x)}" for each in places
            ],
            settings=[each.setting for each in places],
        ),
    ]
    chart = line_chart(title, lines, x_label=x_label)
    names = ", ".join(place.label for place in best)
    return chart and chart._replace(said=f"{title}: on the frontier are {names}")


def frontier(places: Sequence[Place]) -> list[Place]:
    """Return the places that no other place beats in both means, by rising x."""
    kept: list[Place] = []
    for place in sorted(places, key=lambda each: (each.x.mean, -each.y.mean)):
        if not kept or place.y.mean > kept[-1].y.mean:
            kept.append(place)
    return kept


def parameter_chart(
    title: str, values: Sequence[object], found: Sequence[Estimate]
) -> Chart | None:
    """Return a chart of a measure over the values of a parameter, with 95 % intervals.

    Values that are not numbers are drawn at equal distances. If every value was tried once, as in a
    search, the values are not joined.
    """
    numbers = [float(value) for value in values if is_number(value)]
    if len(numbers) < len(values):
        places = [float(index) for index in range(len(values))]
        x_ticks: list[Tick] | None = [
            Tick(at, as_typed(value)) for at, value in zip(places, values, strict=True)
        ]
    else:
        place = math.log10 if _spans_decades(numbers) else float
        places = [place(each) for each in numbers]
        marks = numbers if len(numbers) <= MOST_MARKS else _powers(numbers)
        x_ticks = [Tick(place(each), number_text(each)) for each in marks] or None
    halves = [_half(each) for each in found]
    points = [(at, each.mean) for at, each in zip(places, found, strict=True)]
    is_joined = len(values) <= MOST_MARKS or any(each.size > 1 for each in found)
    parameter, _, measure = title.partition(": ")
    names = [f"{parameter}={as_typed(value)}" for value in values]
    line = Line(measure, points, halves, is_joined, names=names)
    return line_chart(title, [line], x_label=parameter, x_ticks=x_ticks)


def parallel_chart(columns: Sequence[Axis], ranks: Sequence[float]) -> ParallelChart:
    """Return a line per setting through its values on every axis; the best is drawn last.

    ``ranks`` are 0 for the worst setting and 1 for the best.
    """
    axes, right = [], 0
    for title, values in columns:
        width = max(AXIS_WIDTH, CHARACTER * len(title) + LINE_HEIGHT)
        heights, marks = _axis_places(values)
        axes.append(DrawnAxis(title, right + width // 2, _drop_touching_marks(marks), heights))
        right += width
    lanes = []
    for setting, rank in sorted(enumerate(ranks), key=lambda each: each[1]):
        places = [(axis.x, axis.heights[setting]) for axis in axes]
        points = " ".join(f"{x},{height:.1f}" for x, height in places if height is not None)
        values = ", ".join(f"{title} {_value(each[setting])}" for title, each in columns)
        lanes.append(Lane(setting, rank, points, f"{setting + 1}: {values}"))
    titles = ", ".join(column.title for column in columns)
    return ParallelChart(f"{len(ranks)} settings over {titles}", right, axes, lanes)


def is_number(value: object) -> TypeGuard[int | float]:
    """Return True if ``value`` is an int or a float but not a bool."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def _half(found: Estimate) -> float:
    return 0.0 if math.isnan(found.half) else found.half


def _value(value: object) -> str:
    return number_text(value) if is_number(value) else as_typed(value)


def _axis_places(values: Sequence[object]) -> tuple[list[float | None], list[Tick]]:
    """Return the height of every value on its axis, and the labels of the axis."""
    known = [float(value) for value in values if is_number(value)]
    if not known or any(value is not None and not is_number(value) for value in values):
        names = list(dict.fromkeys(map(as_typed, values)))
        heights = [_height((index + 0.5) / len(names)) for index in range(len(names))]
        labels = [Tick(height, name) for height, name in zip(heights, names, strict=True)]
        return [heights[names.index(as_typed(value))] for value in values], labels
    place = math.log10 if _spans_decades(known) else float
    low, high = place(min(known)), place(max(known))

    def height(value: float) -> float:
        return _height((place(value) - low) / (high - low) if high > low else 0.5)

    distinct = sorted(set(known))
    marks = distinct if len(distinct) <= MOST_MARKS else [distinct[0], distinct[-1]]
    labels = [Tick(height(value), number_text(value)) for value in marks]
    return [height(value) if is_number(value) else None for value in values], labels


def _height(share: float) -> float:
    """Return the height of a share of an axis, from its bottom."""
    bottom, top = AXIS_ENDS
    return bottom + share * (top - bottom)


def _spans_decades(values: Sequence[float]) -> bool:
    return min(values) > 0 and max(values) > WIDE_RATIO * min(values)


def _powers(values: Sequence[float]) -> list[float]:
    """Return the powers of ten among values that span decades; none of other values."""
    if not _spans_decades(values):
        return []
    lowest, highest = math.ceil(math.log10(min(values))), math.floor(math.log10(max(values)))
    return [10.0**power for power in range(lowest, highest + 1)]


def _drop_touching_marks(marks: Sequence[Tick]) -> list[Tick]:
    """Return the marks of an axis without those whose labels would touch another."""
    kept: list[Tick] = []
    for mark in sorted(marks):
        if not kept or mark.at - kept[-1].at >= LINE_HEIGHT:
            kept.append(mark)
    return kept
