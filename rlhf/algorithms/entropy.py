"""The coefficient of the entropy bonus, fixed or steered to a target."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Self


@dataclass(frozen=True, slots=True)
class EntropyController:
    """A coefficient of the entropy bonus that steers the entropy to a target, in nats per token.

        coefficient += step if entropy < target, otherwise coefficient -= step, to no less than 0
        weight       = coefficient if entropy <= target, otherwise 0

    This is the adaptive entropy control of https://arxiv.org/abs/2505.22312 section 3.2.5; without
    a target, ``coefficient`` is fixed.
    """

    coefficient: float
    target: float | None
    step: float
    is_above: bool = False  # the last measured entropy is above the target

    @property
    def weight(self) -> float:
        """Return the weight of the entropy bonus in the next updates."""
        return 0.0 if self.is_above else self.coefficient

    def adapt_to_entropy(self, entropy: float) -> Self:
        """Return the controller after updates in which the policy had ``entropy``."""
        if self.target is None or math.isnan(entropy):
            return self
        change = self.step if entropy < self.target else -self.step
        coefficient = max(0.0, self.coefficient + change)
        return replace(self, coefficient=coefficient, is_above=entropy > self.target)
