"""The step of a phase whose held-out metric is the best so far: checkpoint.best and patience."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from rlhf.base.errors import ConfigError
from rlhf.config.choices import Phase
from rlhf.config.schema.run import CheckpointConfig

LOWER_IS_BETTER = ("loss", "perplexity", "kl")


@dataclass
class BestStep:
    """The best value of a metric so far, the step it was measured at, and evaluations since."""

    metric: str | None  # None: checkpoint.best is no metric of this phase
    patience: int | None
    value: float | None = None
    step: int | None = None
    waits: int = 0

    @classmethod
    def before_first_evaluation(cls, config: CheckpointConfig, phase: Phase) -> BestStep:
        """Return the state before the first evaluation of ``phase``."""
        is_own = config.best is not None and config.best.startswith(f"{phase}/")
        return cls(config.best if is_own else None, config.patience)

    def update(self, values: Mapping[str, float], step: int) -> str | None:
        """Record the metrics after ``step``; return why the phase should stop early, or None.

        NaN is never the best.

        Raises:
            ConfigError: if ``values`` lacks the metric.
        """
        if self.metric is None:
            return None
        if self.metric not in values:
            raise ConfigError(
                f"checkpoint.best={self.metric}: this run does not measure it; it measures "
                f"{', '.join(values)}"
            )
        value = values[self.metric]
        sign = -1 if self.metric.endswith(LOWER_IS_BETTER) else 1
        is_better = self.value is None or sign * value > sign * self.value
        if is_better and not math.isnan(value):
            self.value, self.step, self.waits = value, step, 0
            return None
        self.waits += 1
        if self.patience is None or self.waits < self.patience:
            return None
        if self.value is None:
            return f"{self.metric} was never a number"
        return f"{self.metric} was best after step {self.step} ({self.value:.4g})"
