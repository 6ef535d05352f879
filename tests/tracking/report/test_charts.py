"""Charts: what is drawn is what was measured."""

from __future__ import annotations

import math
import re
from xml.etree import ElementTree

import pytest

from rlhf.tracking.report.charts import (
    MOST_POINTS,
    Flag,
    Line,
    Scale,
    line_chart,
    number,
    thinned,
    ticks,
)


def svg_of(chart: str) -> ElementTree.Element:
    found = ElementTree.fromstring(chart).find("svg")
    assert found is not None
    return found


def test_chart_says_what_it_shows() -> None:
    lines = [Line("a", [(1, 2.0), (2, 4.0)]), Line("b", [(1, 0.0), (3, 1.0)])]
    svg = svg_of(line_chart("Clips & more", lines, unit="share"))
    assert svg.get("aria-label") == "Clips & more: a from 2 to 4; b from 0 to 1"
    assert svg.get("role") == "img"
    assert len(svg.findall("polyline")) == 2


def test_points_keep_their_order_and_proportions() -> None:
    svg = svg_of(line_chart("t", [Line("a", [(0, 0.0), (5, 5.0), (10, 10.0)])]))
    line = svg.find("polyline")
    assert line is not None
    (x0, y0), (x1, y1), (x2, y2) = (
        map(float, p.split(",")) for p in (line.get("points") or "").split()
    )
    assert x1 - x0 == pytest.approx(x2 - x1, abs=0.2)
    assert y0 - y1 == pytest.approx(y1 - y2, abs=0.2)
    assert y0 > y1, "larger values are higher up"


def test_values_that_are_not_finite_are_left_out() -> None:
    points = [(1, 1.0), (2, math.nan), (3, math.inf), (4, 2.0)]
    svg = svg_of(line_chart("t", [Line("a", points, [0.1] * 4)]))
    assert svg.get("aria-label") == "t: a from 1 to 2"
    assert len([e for e in svg.findall("path") if "half" in (e.get("class") or "")]) == 2
    assert not re.search("nan|inf", ElementTree.tostring(svg).decode())
    assert line_chart("t", [Line("a", [(1, math.nan)])]) == ""


def test_healthy_range_is_shaded_where_the_chart_shows_it() -> None:
    inside = svg_of(line_chart("t", [Line("a", [(0, 0.0), (1, 1.0)])], healthy=(0.2, 0.4)))
    band = inside.find("rect")
    assert band is not None
    assert float(band.get("height") or 0) == pytest.approx((240 - 34 - 12) * 0.2 / 1.1, abs=0.2)
    outside = svg_of(line_chart("t", [Line("a", [(0, 0.0), (1, 1.0)])], healthy=(5, 6)))
    assert outside.find("rect") is None


def test_flag_links_to_its_alarm_and_is_escaped() -> None:
    chart = line_chart("t", [Line("a", [(0, 0.0), (1, 1.0)])], flags=[Flag(1, "<b>", "alarm-x")])
    link = svg_of(chart).find("a")
    assert link is not None
    assert (link.get("href"), link.get("aria-label")) == ("#alarm-x", "<b>")
    assert "<b>" not in chart


def test_a_constant_can_be_drawn() -> None:
    for value in (0.0, 3.0, -2.0):
        assert "polyline" in line_chart("t", [Line("a", [(0, value), (1, value)])])
    assert "circle" in line_chart("t", [Line("a", [(7, 1.0)])])


def test_long_lines_keep_their_extremes() -> None:
    points = [(float(n), math.sin(n)) for n in range(100_000)]
    points[31_234] = (31_234.0, 50.0)
    points[31_235] = (31_235.0, -50.0)
    kept = thinned(points)
    assert len(kept) <= MOST_POINTS
    assert {50.0, -50.0} <= {y for _, y in kept}
    assert kept == sorted(kept)
    assert thinned(points[:600]) == points[:600]


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0, 1, [0, 0.2, 0.4, 0.6, 0.8, 1.0]),
        (-1, 80, [0, 20, 40, 60, 80]),
        (0.0011, 0.0049, [0.002, 0.003, 0.004]),
    ],
)
def test_ticks_are_round(low: float, high: float, expected: list[float]) -> None:
    assert ticks(low, high) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0, "0"), (0.2, "0.2"), (1234.5, "1.23e+03"), (2e-6, "2.0e-06"), (math.nan, "nan")],
)
def test_numbers_are_short(value: float, text: str) -> None:
    assert number(value) == text


def test_scale_maps_its_ends() -> None:
    scale = Scale(1, 3, 100, 200)
    assert [scale(1), scale(2), scale(3)] == [100, 150, 200]
