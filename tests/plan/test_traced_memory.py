"""Planned beside traced memory of models of real size (benchmarks/planner.md)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.pretend_cuda.memory import differences, traced_elsewhere
from tests.runs import ON_GPU  # noqa: F401 (by it conftest.py deals the tests)
from tools.docs import memory_table
from tools.docs.memory_table import CONFIGURATIONS, TRACED, moments

CONF = Path(__file__).parents[2] / "conf"
PAGE = CONF.parent / "benchmarks" / "planner.md"


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_the_plan_is_within_a_tenth_of_the_trace_as_the_page_says(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = list(moments(CONF, name))
    for moment in found:
        assert moment.ratio == pytest.approx(1, abs=0.1), moment
    monkeypatch.setattr(memory_table, "CONFIGURATIONS", [name])
    monkeypatch.setattr(memory_table, "moments", lambda *_: found)
    header, rows = memory_table.memory_rows(CONF)
    lines = PAGE.read_text().splitlines()
    for cells in (header, *rows):
        assert f"| {' | '.join(cells)} |" in lines


@pytest.mark.slow
def test_the_smallest_model_takes_what_is_stored() -> None:
    found = traced_elsewhere("OPT-125M")  # make soak traces all models
    assert not differences(found, json.loads(TRACED.read_text()))
