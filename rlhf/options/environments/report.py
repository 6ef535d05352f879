"""Rows for results of episodes in the summary of a run."""

from __future__ import annotations

from typing import ClassVar

from rlhf.base.seams import ReportParts


class EpisodeReport(ReportParts):
    """The summary's rows for episodes: return, success and number of turns."""

    changes: ClassVar = {
        "return of an episode": "return",
        "share of successes": "success",
        "turns of an episode": "turns",
    }
    comparison_values: ClassVar = {
        "optimal return": "optimum",
        "random turns' return": "random_return",
    }


REPORT = EpisodeReport()
