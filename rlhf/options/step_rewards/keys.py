"""Keys that a part of ``rewards`` with kind=steps reads; all are the core's."""

from __future__ import annotations

from rlhf.config.choices import RewardKind

OWN = ("function*", "run_code", "pattern*", "columns")
REWARDS = {RewardKind.steps: ("kind", "weight", "timeout_seconds", "fallback", *OWN)}
