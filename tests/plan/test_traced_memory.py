"""Planned beside traced memory of models of real size (benchmarks/planner.md).

``make soak`` traces it again.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.docs.memory_table import CONFIGURATIONS, moments

CONF = Path(__file__).parents[2] / "conf"


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_the_plan_is_within_a_tenth_of_the_trace(name: str) -> None:
    for moment in moments(CONF, name):
        assert moment.ratio == pytest.approx(1, abs=0.1), moment


def test_the_plan_knows_how_many_weights_are_rounded_at_once() -> None:
    from rlhf.engine.masters import CHUNK
    from rlhf.plan.outside_steps import ROUNDED_AT_ONCE

    assert ROUNDED_AT_ONCE == CHUNK
