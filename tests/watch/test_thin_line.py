"""Long lines lose points, and neither their extremes nor their last value."""

from __future__ import annotations

import math
from itertools import takewhile

from rlhf.report.charts import MOST_POINTS
from rlhf.watch.live_run import ThinLine


def value(step: int) -> float:
    return math.sin(step / 700) + 0.1 * math.sin(97 * step) + (5.0 if step == 12_345 else 0.0)


def test_a_long_line_keeps_extremes_and_the_last_point() -> None:
    line, points = ThinLine(), [(step, value(step)) for step in range(20_000)]
    num_sent, num_whole, shown = 0, 0, []
    for number, point in enumerate(points, start=1):
        line.add(point)
        if number % 10 == 0:  # a page asks
            kept = line.points()
            pairs = zip(shown, kept, strict=False)
            same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
            num_sent += len(kept) - same
            num_whole += same < len(kept) / 2
            shown = kept
            assert kept[-1] == point
            assert len(kept) <= MOST_POINTS
    assert shown == sorted(shown)
    assert {min(points, key=lambda p: p[1]), max(points, key=lambda p: p[1])} <= {*shown}
    assert len(shown) > MOST_POINTS / 3
    assert num_sent < 8 * 2_000, "about the new points of each of the 2,000 requests"
    assert num_whole < 12, "at the start, and when buckets are merged"
