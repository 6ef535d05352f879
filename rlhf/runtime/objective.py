"""The objective of a run, and the error of a run that ends without a finite one."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlhf.base.errors import CheckpointError, RlhfError
from rlhf.config.choices import Phase

# The objective is a measure of the last phase: the first of these that the phase has.
MEASURES: Mapping[Phase, tuple[str, ...]] = {
    Phase.sft: ("perplexity_after",),
    Phase.reward: ("accuracy",),
    Phase.ppo: ("gold_after", "score_after"),
    Phase.dpo: ("gold_after", "accuracy"),
}


def objective_measure(phases: Mapping[str, Mapping[str, Any]], run_dir: Path) -> tuple[str, float]:
    """Return the name PHASE.MEASURE of the objective, and its value; a perplexity is negated.

    Raises:
        CheckpointError: if the last phase has no such measure.
    """
    phase, measures = list(phases.items())[-1]
    for name in MEASURES[Phase(phase)]:
        if isinstance(value := measures.get(name), int | float):
            return f"{phase}.{name}", -value if phase == Phase.sft else value
    raise CheckpointError(
        f"{run_dir / phase / 'result.json'} has no {MEASURES[Phase(phase)][-1]}: it is damaged, or "
        f"of another version. Restore it, or remove it: resume={run_dir} trains {phase} again"
    )


def require_finite(phases: Mapping[str, Mapping[str, Any]], run_dir: Path) -> None:
    """Check that the objective of a run that has ended is a finite number.

    Raises:
        RlhfError: naming the measures that are not finite, and what to do.
    """
    name, value = objective_measure(phases, run_dir)
    if math.isfinite(value):
        return
    bad = [
        f"{phase}.{measure}"
        for phase, measures in phases.items()
        for measure, number in measures.items()
        if isinstance(number, float) and not math.isfinite(number)
    ]
    phase = bad[0].partition(".")[0]
    raise RlhfError(
        f"{run_dir}: the run has ended without an objective, since {name} is not a finite number "
        f"(not finite: {', '.join(bad)}). Either the weights that {phase} started from are damaged "
        f"or its training diverged: {run_dir}/report.html shows the step. Start a new run with a "
        f"lower learning rate of {phase}, with hardware.dtype=fp32, or from other weights"
    )
