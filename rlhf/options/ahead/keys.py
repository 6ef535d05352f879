"""Keys for sampling with older weights, and during training."""

from __future__ import annotations

from dataclasses import dataclass

from rlhf.config.schema.keys import ABOVE_0, AT_LEAST_0, ONLY_PPO, AtResume, key, needs

SCRATCH = "sampling"  # folder in RUN_DIR/ppo for weights and responses of sampling processes


@dataclass(kw_only=True)
class AheadKeys:
    """Keys of the group ``rollout`` for sampling with older weights, and during training."""

    lag: int = key(AT_LEAST_0, affects=ONLY_PPO)
    """PPO: sample each step with the weights of this many steps earlier; 0: the current weights."""
    overlap: bool = key(affects=ONLY_PPO, at_resume=AtResume.rounding)
    """Sample in separate processes while ranks train, which requires a lag (docs/rollouts.md)."""
    samplers: int = key(
        ABOVE_0, affects=ONLY_PPO, at_resume=AtResume.rounding, unread=[needs("overlap", "true")]
    )
    """Processes that sample if overlap=true; each needs cores, or a GPU, besides the ranks'."""
