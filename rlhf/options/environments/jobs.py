"""Examples that an environment makes, before a run starts."""

from __future__ import annotations

from rlhf.base.seams import JobParts
from rlhf.config.schema.run import RunConfig


class EpisodeExamples(JobParts):
    """Examples that take an episode each, whose turns may be slow."""

    def has_slow_examples(self, config: RunConfig) -> bool:
        """Return True for an environment with processes of its own."""
        return config.environment.is_used and bool(config.environment.processes)


JOBS = EpisodeExamples()
