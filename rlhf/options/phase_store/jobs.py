"""Choose whether a job reuses phases by how it is started."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from rlhf.base.seams import JobParts
from rlhf.config.schema.run import RunConfig
from rlhf.options.phase_store.keys import Reuse


class ReuseInSweeps(JobParts):
    """Jobs of sweeps and trials of searches reuse phases, unless the command sets reuse.phases."""

    def complete_config(self, config: RunConfig, *, in_sweep: bool) -> RunConfig:
        """Replace reuse.phases=sweep by what it means for this run."""
        if config.reuse.phases is not Reuse.sweep:
            return config
        phases = Reuse.always if in_sweep else Reuse.never
        return replace(config, reuse=replace(config.reuse, phases=phases))

    def trial_words(self, words: Sequence[str]) -> list[str]:
        """Return reuse.phases=always, unless it is given."""
        is_given = any(word.startswith("reuse.phases=") for word in words)
        return [] if is_given else ["reuse.phases=always"]


JOBS = ReuseInSweeps()
