"""Keys of the rollout that sample with older weights, and beside training."""

from __future__ import annotations

from dataclasses import dataclass

from rlhf.config.schema.keys import ABOVE_0, AT_LEAST_0, AtResume, key

SCRATCH = "sampling"  # folder of weights and responses in RUN_DIR/ppo


@dataclass(kw_only=True)
class AheadKeys:
    """Part of the group ``rollout``."""

    lag: int = key(AT_LEAST_0)
    """PPO: sample each step with the weights of this many steps earlier; 0: the current weights."""
    overlap: bool = key(at_resume=AtResume.rounding)
    """Sample in processes of its own while ranks train, which requires a lag (docs/rollouts.md)."""
    samplers: int = key(ABOVE_0, at_resume=AtResume.rounding)
    """Processes that sample if overlap=true; each needs cores, or a GPU, beside those of ranks."""
