"""Report to the planner if examples are slow to make."""

from __future__ import annotations

from rlhf.base.seams import JobParts
from rlhf.config.schema.run import RunConfig


class EpisodeExamples(JobParts):
    """Job parts that tell the planner whether episodes, the examples of a run, are slow."""

    def has_slow_examples(self, config: RunConfig) -> bool:
        """Return True for an environment that runs in separate processes."""
        return config.environment.is_used and bool(config.environment.processes)


JOBS = EpisodeExamples()
