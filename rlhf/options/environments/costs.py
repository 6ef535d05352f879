"""Costs of responses of several turns."""

from __future__ import annotations

from rlhf.base.seams import Costs, Generation
from rlhf.config.schema.run import RunConfig


class EpisodeCosts(Costs):
    """The KV cache of episodes that wait for their environment."""

    def adapt_generation(self, config: RunConfig, generation: Generation) -> Generation:
        """Count parked episodes too; few episodes use all turns that they may take."""
        return generation._replace(caches_per_row=2, ends_early=True)


COSTS = EpisodeCosts()
