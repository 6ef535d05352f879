"""Costs of episodes."""

from __future__ import annotations

from rlhf.base.seams import Costs, Generation
from rlhf.config.schema.run import RunConfig


class EpisodeCosts(Costs):
    """Costs of episodes: the KV cache of episodes that wait for their environment."""

    def adapt_generation(self, config: RunConfig, generation: Generation) -> Generation:
        """Add a KV cache per row, for a parked episode; few episodes take all their turns."""
        return generation._replace(caches_per_row=2, ends_early=True)


COSTS = EpisodeCosts()
