"""The coefficient of the entropy bonus, by hand and against a closed form."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhf.algorithms.entropy import EntropyController
from tests.algorithms.padded_batches import quick


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


@quick
@given(
    entropies=st.lists(st.sampled_from([0.3, math.nan]) | st.floats(0, 1), max_size=20),
    step=st.floats(0.01, 0.1),
)
def test_the_coefficient_is_its_steps_since_its_lowest_point(
    entropies: list[float], step: float
) -> None:
    """A sum that is held at 0 is the plain sum minus the plain sum's lowest value, if negative."""
    controller = EntropyController(coefficient=0.02, target=0.3, step=step)
    measured = [each for each in entropies if not math.isnan(each)]
    signs = [0.02, *(step if each < 0.3 else -step for each in measured)]
    sums = [math.fsum(signs[: n + 1]) for n in range(len(signs))]
    expected = sums[-1] - min(0.0, *sums)
    for entropy in entropies:
        controller = controller.adapt_to_entropy(entropy)
    assert controller.coefficient == pytest.approx(expected, abs=1e-12)
    is_above = bool(measured) and measured[-1] > 0.3
    assert controller.weight == (0.0 if is_above else controller.coefficient)
