"""Results of episodes for people."""

from __future__ import annotations

from typing import ClassVar

from rlhf.base.seams import ReportParts


class EpisodeReport(ReportParts):
    """Return, success and length of episodes."""

    changes: ClassVar = {
        "return of an episode": "return",
        "share of successes": "success",
        "turns of an episode": "turns",
    }
    yardsticks: ClassVar = {
        "optimal return": "optimum",
        "random turns' return": "random_return",
    }


REPORT = EpisodeReport()
