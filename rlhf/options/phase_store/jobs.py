"""Decide if a job reuses phases: jobs of sweeps and trials of searches do by default."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from rlhf.config.schema.run import RunConfig
from rlhf.options.phase_store.keys import Reuse


def complete_config(config: RunConfig, *, in_sweep: bool) -> RunConfig:
    """Replace reuse.phases=sweep by always in a sweep, and by never in other runs."""
    if config.reuse.phases is not Reuse.sweep:
        return config
    phases = Reuse.always if in_sweep else Reuse.never
    return replace(config, reuse=replace(config.reuse, phases=phases))


def added_trial_overrides(words: Sequence[str]) -> list[str]:
    """Return [reuse.phases=always]; [] if one of the overrides ``words`` sets the key."""
    is_given = any(word.startswith("reuse.phases=") for word in words)
    return [] if is_given else ["reuse.phases=always"]
