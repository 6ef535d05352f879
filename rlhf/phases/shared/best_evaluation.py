"""The best of a phase's evaluations, by the metric that checkpoint.best names."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from rlhf.config.choices import Phase
from rlhf.config.schema.run import CheckpointConfig
from rlhf.errors import ConfigError

LOWER_IS_BETTER = ("loss", "perplexity", "kl")


class BestEvaluation:
    """The best evaluation of a phase; ``metric`` is None if it is another phase's."""

    def __init__(self, config: CheckpointConfig, phase: Phase) -> None:
        is_ours = config.best is not None and config.best.startswith(f"{phase}/")
        self.metric = config.best if is_ours else None
        self.value: float | None = None
        self.step: int | None = None
        self._patience = config.patience
        self._waits = 0  # evaluations since the best one

    @property
    def numbers(self) -> list[Any]:
        """Return the state as JSON values."""
        return [self.value, self.step, self._waits]

    def load_numbers(self, numbers: Sequence[Any]) -> None:
        """Continue from a state."""
        self.value, self.step, self._waits = numbers

    def add(self, values: Mapping[str, float], step: int) -> str | None:
        """Count the evaluation after ``step``; return why the phase should end, if it should.

        Raises:
            ConfigError: if the metric is not one of ``values``.
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
        if not math.isnan(value) and (self.value is None or sign * value > sign * self.value):
            self.value, self.step, self._waits = value, step, 0
            return None
        self._waits += 1
        if self._patience is None or self._waits < self._patience:
            return None
        if self.value is None:
            return f"{self.metric} was never a number"
        return f"{self.metric} was best after step {self.step} ({self.value:.4g})"
