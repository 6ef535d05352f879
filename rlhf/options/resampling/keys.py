"""Key of PPO that replaces prompts without a learning signal."""

from __future__ import annotations

from dataclasses import dataclass

from rlhf.config.schema.keys import AT_LEAST_0, key


@dataclass(kw_only=True)
class ResamplingKeys:
    """Keys of the group ``ppo`` for DAPO's dynamic sampling."""

    resampling_rounds: int = key(AT_LEAST_0)
    """DAPO's dynamic sampling: how often a prompt whose responses all have the same score is
    replaced by another one; 0: never."""
