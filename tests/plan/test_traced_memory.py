"""Planned beside traced memory of models of real size (benchmarks/planner.md).

``make soak`` traces it again.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.docs import memory_table
from tools.docs.memory_table import CONFIGURATIONS, moments

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
