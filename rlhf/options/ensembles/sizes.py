"""Number of steps in which the further members learn, after the steps of the first member."""

from __future__ import annotations

import math

from rlhf.config.batches import examples_per_step
from rlhf.config.choices import Phase
from rlhf.config.schema.run import RunConfig


def num_added_steps(config: RunConfig, phase: Phase, *, examples: int) -> int:
    """Return the number of optimizer steps of the further members; 0 unless ``phase`` is reward."""
    if phase is not Phase.reward:
        return 0
    return math.ceil(examples * config.reward.member_epochs / examples_per_step(config, phase))
