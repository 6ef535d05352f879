"""Planned beside traced memory of models of real size (benchmarks/planner.md)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.pretend_cuda.gpu import missing_to_pretend
from tests.pretend_cuda.memory import differences, traced_elsewhere
from tools.docs.memory_table import CONFIGURATIONS, TRACED, moments

CONF = Path(__file__).parents[2] / "conf"
STORED = json.loads(TRACED.read_text())
TRACED_HERE = ("OPT-125M",)  # the quickest; make soak traces all


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_the_plan_is_within_a_tenth_of_the_trace(name: str) -> None:
    for moment in moments(CONF, name):
        assert moment.ratio == pytest.approx(1, abs=0.1), moment


@pytest.mark.slow
@pytest.mark.skipif(missing_to_pretend() is not None, reason=str(missing_to_pretend()))
@pytest.mark.parametrize("name", TRACED_HERE)
def test_the_stored_figures_are_those_of_this_code(name: str) -> None:
    assert not differences(traced_elsewhere(name), STORED)


def test_the_plan_knows_how_many_weights_are_rounded_at_once() -> None:
    from rlhf.engine.masters import CHUNK
    from rlhf.plan.outside_steps import ROUNDED_AT_ONCE

    assert ROUNDED_AT_ONCE == CHUNK
