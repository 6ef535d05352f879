"""Key of PPO that normalises each reward on its own."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(kw_only=True)
class GdpoKeys:
    """Keys of the group ``ppo`` for GDPO."""

    gdpo: bool
    """GDPO: normalise each of rewards over the responses to a prompt, add them by weight, and
    normalise the sums over the rollout; needs advantage_estimator=dr_grpo."""
