"""Micro-batches of the corpus, whose gradients the actor adds to its own."""

from __future__ import annotations

from rlhf.config.schema.run import RunConfig
from rlhf.options.ptx.rules import ptx_plan


def actor_micro_batches(config: RunConfig) -> int:
    """Return the micro-batches of the corpus in an optimizer step of the actor."""
    return ptx_plan(config).accumulation
