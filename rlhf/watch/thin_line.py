"""Keep a bounded number of points of a line that grows without end."""

from __future__ import annotations

from rlhf.report.charts import MOST_POINTS, Point

MOST_BUCKETS = MOST_POINTS // 2 - 2  # of two points each; the rest is for the open bucket


class ThinLine:
    """A line of at most ``MOST_POINTS`` points: the lowest and the highest of each bucket.

    Full buckets do not change until there are too many. Then every two neighbours become one, so a
    page that follows the line seldom receives it as a whole.
    """

    def __init__(self) -> None:
        self._full: list[tuple[Point, Point]] = []  # the lowest and the highest point of each
        self._size = 1  # points that fill a bucket
        self._open: list[Point] = []  # the points of the last bucket, which is not full
        self._last: list[Point] = []  # the point that was added last

    def add(self, point: Point) -> None:
        """Append ``point``, whose x is the largest so far."""
        self._last = [point]
        self._open.append(point)
        if len(self._open) == self._size:
            self._full.append(_extremes(self._open))
            self._open = []
        if len(self._full) == MOST_BUCKETS:
            pairs = zip(self._full[::2], self._full[1::2], strict=True)
            self._full = [_extremes([*left, *right]) for left, right in pairs]
            self._size *= 2

    def points(self) -> list[Point]:
        """Return the points that are kept, and always the last point that was added."""
        buckets = [*self._full, _extremes(self._open)] if self._open else self._full
        kept = [point for bucket in buckets for point in sorted({*bucket})]
        return kept if kept[-1:] == self._last else kept + self._last


def _extremes(points: list[Point]) -> tuple[Point, Point]:
    """Return the lowest and the highest of ``points``."""
    return min(points, key=_height), max(points, key=_height)


def _height(point: Point) -> float:
    return point[1]
