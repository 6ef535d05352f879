"""Schema and rules of the config group ``checkpoint``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rlhf.base.errors import refuse_broken_rule
from rlhf.config.choices import Phase
from rlhf.config.schema.keys import ABOVE_0, SECONDS, AtResume, key

if TYPE_CHECKING:
    from rlhf.config.schema.run import RunConfig


def phases_that_measure_best(config: Any) -> frozenset[Phase]:
    """Return the phase whose metric checkpoint.best names, in a set; empty if there is none."""
    name = (config.checkpoint.best or "").partition("/")[0]
    return frozenset(phase for phase in Phase if phase == name)


@dataclass(kw_only=True)
class CheckpointKeys:
    """Keys for checkpoints inside a phase, from which resume continues (docs/operations.md)."""

    every_minutes: float | None = key(ABOVE_0)
    """Minutes between checkpoints; null: not by time."""
    every_steps: int | None = key(ABOVE_0)
    """Steps between checkpoints; null: not by steps."""
    keep: int = key(ABOVE_0)
    """Number of latest checkpoints that are kept; the best checkpoint is kept beside them."""
    keep_finished: bool
    """Keep the checkpoints of finished phases too; false: only the latest of the last phase."""
    best: str | None = key(affects=phases_that_measure_best, at_resume=AtResume.fixed)
    """Held-out metric whose best checkpoint is kept, such as ppo/eval_score; null: none."""
    load_best: bool = key(affects=phases_that_measure_best, at_resume=AtResume.fixed)
    """End the phase of the metric with its best checkpoint instead of the last step."""
    patience: int | None = key(ABOVE_0, affects=phases_that_measure_best, at_resume=AtResume.fixed)
    """End the phase after this many evaluations in a row without a new best; null: never."""
    stop_after: str | None
    """Step after which the run stops with a checkpoint, such as ppo/40; resume continues it."""
    most_skipped: int | None = key(ABOVE_0)
    """Steps in a row without finite gradients after which the run ends; null: never."""
    grace_seconds: int = key(SECONDS)
    """Seconds after SIGTERM in which a step may end and a checkpoint be written."""


def check_checkpoint(config: RunConfig) -> None:
    """Check that checkpoints can be written, and that checkpoint.best is measured while training.

    With zero.nvme_path, every_minutes is accepted, because it is set by default: the run then
    prints that it writes no checkpoints.
    """
    checkpoint, order, nvme = config.checkpoint, config.phase.order, config.zero.nvme_path
    phases, stop, best = ", ".join(order), checkpoint.stop_after, checkpoint.best
    stop_phase, _, step = (stop or "").partition("/")
    name, _, metric = (best or "").partition("/")
    broken = {
        **{
            f"checkpoint.{key}={value} with zero.nvme_path={nvme}: a checkpoint inside a phase "
            f"cannot read an optimizer that is on a drive; remove checkpoint.{key}, or use "
            "zero=stage3_offload": nvme is not None and value is not None
            for key in ("every_steps", "stop_after", "best")
            for value in [getattr(checkpoint, key)]
        },
        f"checkpoint.stop_after={stop}: must be PHASE/STEP, one of {phases} and a step of at least "
        f"1, such as {order[-1]}/10": (
            stop is not None and (stop_phase not in order or not step.isdecimal() or int(step) == 0)
        ),
        **{
            f"checkpoint.{key}={str(value).lower()}: no metric says what is best; add "
            "checkpoint.best, such as checkpoint.best=ppo/eval_score": best is None and bool(value)
            for key in ("load_best", "patience")
            for value in [getattr(checkpoint, key)]
        },
        f"checkpoint.best={best}: must be a held-out metric PHASE/eval_NAME of {phases} "
        "(python launch.py --help /eval_)": (
            best is not None and (name not in order or not metric.startswith("eval_"))
        ),
        f"checkpoint.best={best} with {name}.eval_every=0: the metric is measured only at the end; "
        f"set {name}.eval_every to a number of steps": (
            name in order and not getattr(config, name).eval_every
        ),
    }
    refuse_broken_rule(broken)
