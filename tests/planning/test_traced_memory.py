"""Planned beside traced memory of models of real size (docs/planner.md)."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.pretend_cuda.memory import differences, traced_elsewhere
from tools.docs.memory_table import CONFIGURATIONS, TRACED, moments

CONF = Path(__file__).parents[2] / "conf"
STORED = json.loads(TRACED.read_text())
CHEAPEST = next(iter(CONFIGURATIONS))  # make soak traces all of them again


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_the_plan_is_within_a_tenth_of_the_trace(name: str) -> None:
    for moment in moments(CONF, name):
        assert moment.ratio == pytest.approx(1, abs=0.1), moment


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler")
def test_the_stored_figures_are_those_of_this_code() -> None:
    assert not differences(traced_elsewhere(CHEAPEST), STORED)
