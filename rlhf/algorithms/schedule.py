"""Learning-rate schedules as pure functions of the optimizer step."""

from __future__ import annotations

import math
from typing import Literal

from rlhf.base.types import Schedule

ScheduleName = Literal["constant", "linear", "cosine", "inverse_sqrt"]


def build_lr_schedule(
    name: ScheduleName, *, warmup_steps: int, total_steps: int, min_ratio: float
) -> Schedule:
    """Return a function that maps optimizer step 0, 1, ... to a share of the peak learning rate.

    The share rises linearly over ``warmup_steps``, starting at 1 / warmup_steps, not at 0. Then it
    stays at 1 (constant), or falls to ``min_ratio`` at the last step, linearly or along a half
    cosine. inverse_sqrt falls as sqrt(warmup_steps / (step + 1)), whatever the last step is, and
    stops at ``min_ratio``; without warm-up it falls from the first step on.
    """

    def lr_share(step: int) -> float:
        if step < warmup_steps:
            return (step + 1) / warmup_steps
        done = min(1.0, (step - warmup_steps) / max(1, total_steps - 1 - warmup_steps))
        match name:
            case "constant":
                return 1.0
            case "linear":
                return 1.0 - (1.0 - min_ratio) * done
            case "cosine":
                return min_ratio + (1.0 - min_ratio) * 0.5 * (1.0 + math.cos(math.pi * done))
            case "inverse_sqrt":
                return max(min_ratio, math.sqrt(max(1, warmup_steps) / (step + 1)))

    return lr_share
