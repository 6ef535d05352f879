"""Warn in a report that the score was corrupted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rlhf.report.run_charts import ReportPart

TEXT = (
    "ppo: rewards.{name} (kind=bias) corrupts the score on purpose from step {onset} on, so the "
    "score does not measure quality; read the gold score or a judge, and use the model for "
    "nothing else"
)


class BiasReport(ReportPart):
    """A warning in the report of a run whose score was corrupted."""

    def doubts(self, phases: Mapping[str, Mapping[str, Any]]) -> Sequence[str]:
        """Return a line for each bias that corrupted the score."""
        onsets = phases["ppo"].get("bias_onsets", {})
        return [TEXT.format(name=name, onset=onset) for name, onset in onsets.items()]
