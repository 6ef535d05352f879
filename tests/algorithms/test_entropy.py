"""The coefficient of the entropy bonus against a closed form."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhf.algorithms.entropy import EntropyController
from tests.algorithms.padded_batches import quick


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
    fixed = EntropyController(coefficient=0.02, target=None, step=step)
    assert fixed.adapt_to_entropy(0.1) is fixed
