"""Self-distillation from a hint where hardly any answer is wholly right at the start."""

from __future__ import annotations

from dataclasses import replace

from papers import self_distillation
from papers.claims import Figures, Place


def measure(seed: int, place: Place) -> Figures:
    """Return the figures with answers of 16 letters."""
    return self_distillation.measure(seed, place, horizon=16)


RESULT = replace(
    self_distillation.RESULT,
    title="Self-distillation from a hint, longer answers",
    criterion="As for self-distillation from a hint, but of 16 letters, so that about 0.3 % of the "
    "answers are wholly right at the start instead of 6 %. Passed: the interval lies above 0. "
    "Failed: it lies below.",
    note="Committed after the first seed of 8 letters, where GRPO needed no more responses. After "
    "12 steps the seeds have 0.96 to 0.99 with the teacher, and 0.74 to 0.98 with GRPO. Without "
    "either the only reward is for ending, and the letters get worse. A share of 0.95 is reached "
    "after 8, 8 and 12 steps with the teacher, and after 8, 8 and 16 with GRPO, evaluated every "
    f"{self_distillation.EARLY} steps. " + self_distillation.REBASED,
    minutes=7,
    measure=measure,
)
