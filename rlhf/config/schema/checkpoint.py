"""Schema of the config group ``checkpoint``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rlhf.config.choices import Phase
from rlhf.config.schema.keys import ABOVE_0, SECONDS, key


def phases_that_measure_best(config: Any) -> frozenset[Phase]:
    """Return the set of the phase that measures checkpoint.best; empty if that is null."""
    name = (config.checkpoint.best or "").partition("/")[0]
    return frozenset(phase for phase in Phase if phase == name)


@dataclass(kw_only=True)
class CheckpointKeys:
    """Checkpoints inside a phase, from which resume continues (docs/operations.md)."""

    every_minutes: float | None = key(ABOVE_0)
    """Minutes between checkpoints; null: not by time."""
    every_steps: int | None = key(ABOVE_0)
    """Steps between checkpoints; null: not by steps."""
    keep: int = key(ABOVE_0)
    """Latest checkpoints that are kept; the best one is kept beside them."""
    keep_finished: bool
    """Keep the checkpoints of a finished phase too, for python -m rlhf.export."""
    best: str | None = key(affects=phases_that_measure_best)
    """Held-out metric whose best checkpoint is kept, such as ppo/eval_score; null: none."""
    load_best: bool = key(affects=phases_that_measure_best)
    """End the phase of the metric with its best checkpoint instead of the last step."""
    patience: int | None = key(ABOVE_0, affects=phases_that_measure_best)
    """End the phase after this many evaluations in a row without a new best; null: never."""
    stop_after: str | None
    """Step after which the run stops with a checkpoint, such as ppo/40; resume continues it."""
    most_skipped: int | None = key(ABOVE_0)
    """Steps in a row with gradients that are not finite after which the run ends; null: never."""
    grace_seconds: int = key(SECONDS)
    """Seconds after SIGTERM in which a step may end and a checkpoint be written."""
