"""Number of micro-batches of the corpus in an optimizer step of the actor."""

from __future__ import annotations

from rlhf.config.schema.run import RunConfig
from rlhf.options.ptx.rules import ptx_batch_plan


def num_added_actor_micro_batches(config: RunConfig) -> int:
    """Return the number of micro-batches of the corpus per optimizer step of the actor."""
    return ptx_batch_plan(config).accumulation
