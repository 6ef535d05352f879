"""Charts: what is drawn is what was measured."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from typing import Any

import pytest

from rlhf.report.charts import MOST_POINTS, Chart, Flag, Line, line_chart, number_text, thin_points
from rlhf.report.page import build_jinja_environment


def chart_of(lines: Sequence[Line], **options: Any) -> Chart:
    chart = line_chart("t", lines, **options)
    assert chart is not None
    return chart


def test_values_that_are_not_finite_are_left_out() -> None:
    points = [(1, 1.0), (2, math.nan), (3, math.inf), (4, 2.0)]
    chart = chart_of([Line("a", points, [0.1] * 4)])
    assert chart.description == "t: a from 1 to 2"
    assert len(chart.data["lines"][0]["half"]) == 2
    json.dumps(chart.data, allow_nan=False)
    assert line_chart("t", [Line("a", [(1, math.nan)])]) is None


def test_healthy_range_is_in_the_legend() -> None:
    line = Line("a", [(0, 0.0), (1, 1.0)])
    chart = chart_of([line], healthy=(0.2, 0.4))
    assert chart.data["healthy"] == (0.2, 0.4)
    assert chart.healthy == "healthy range 0.2 to 0.4"
    assert not chart_of([line]).healthy


def test_axis_of_a_share_ends_at_one() -> None:
    ones = Line("a", [(0, 1.0), (1, 1.0)])
    assert chart_of([ones], unit="share").data["most"] == 1
    assert chart_of([ones], unit="tokens").data["most"] is None
    above = Line("b", [(0, 1.0), (1, 1.2)])
    assert chart_of([ones, above], unit="share").data["most"] is None, "no share"


def test_flag_links_to_its_alarm_and_is_escaped() -> None:
    line = Line("'<b>\"", [(0, 0.0), (1, 1.0)])
    chart = chart_of([line, line], flags=[Flag(1, "<b>", "alarm-x")])
    assert chart.data["flags"] == [1]
    macro = "{% from 'parts.html' import charts %}{{ charts([none, chart]) }}"
    figure = build_jinja_environment().from_string(macro).render(chart=chart)
    assert '<a class="flag" href="#alarm-x">&lt;b&gt;</a>' in figure
    assert "<b>" not in figure
    drawn = re.search("data-chart='([^']*)'", figure)
    assert drawn
    assert json.loads(drawn[1])["lines"][0]["label"] == line.label


def test_a_chart_says_that_points_are_left_out() -> None:
    assert not chart_of([Line("a", [(n, n) for n in range(MOST_POINTS)])]).note
    chart = chart_of([Line("a", [(n, n) for n in range(1234)])])
    assert len(chart.data["lines"][0]["x"]) <= MOST_POINTS


def test_long_lines_keep_their_extremes() -> None:
    points = [(float(n), math.sin(n)) for n in range(100_000)]
    points[31_234] = (31_234.0, 50.0)
    points[31_235] = (31_235.0, -50.0)
    kept = thin_points(points)
    assert len(kept) <= MOST_POINTS
    assert {50.0, -50.0} <= {y for _, y in kept}
    assert kept == sorted(kept)
    assert thin_points(points[:600]) == points[:600]


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0, "0"), (0.2, "0.2"), (2345.6, "2346"), (2e-6, "2.0e-06"), (math.nan, "nan")],
)
def test_numbers_are_short(value: float, text: str) -> None:
    assert number_text(value) == text
