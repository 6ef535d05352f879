"""The coefficient of the entropy bonus, by hand."""

from __future__ import annotations

import math

import pytest

from rlhf.algorithms.entropy import EntropyController


def test_the_coefficient_follows_the_target_by_hand() -> None:
    controller = EntropyController(coefficient=0.01, target=0.2, step=0.02)
    weights = [controller.weight]
    for entropy in (0.1, 0.15, 0.2, 0.3, 0.25, 0.21, 0.1, math.nan, 0.1):
        controller = controller.adapt_to_entropy(entropy)
        weights.append(controller.weight)
    # Up twice, at the target down, then 0.01, 0 and 0 while too high, and up again.
    assert weights == pytest.approx([0.01, 0.03, 0.05, 0.03, 0, 0, 0, 0.02, 0.02, 0.04])
    fixed = EntropyController(coefficient=0.01, target=None, step=0.02)
    assert fixed.adapt_to_entropy(0.1) is fixed
