"""Report to the planner if examples are slow to make."""

from __future__ import annotations

from rlhf.config.schema.run import RunConfig


def has_slow_examples(config: RunConfig) -> bool:
    """Return True for an environment that runs in separate processes."""
    return config.environment.is_used and bool(config.environment.processes)
