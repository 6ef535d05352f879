"""Key of PPO for the log of rollouts."""

from __future__ import annotations

from dataclasses import dataclass

from rlhf.config.schema.keys import AT_LEAST_0, NO_PHASE, key

LOG = "rollouts.jsonl"  # file in the run directory with the logged responses


@dataclass(kw_only=True)
class RolloutLogKeys:
    """Keys of the group ``ppo`` for the log of rollouts."""

    log_rollouts_every: int = key(AT_LEAST_0, affects=NO_PHASE)
    """PPO steps between steps whose responses are all logged to rollouts.jsonl; 0: none."""
