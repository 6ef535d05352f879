"""The report's charts of the critic beside true values."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from rlhf.base.errors import CheckpointError
from rlhf.base.stored_files import read_json_lines
from rlhf_lab.branches.true_value_charts import CRITIC_STATE, TITLES, build_true_value_section


def states_of(steps: Sequence[int], *, bias: float = 0.0) -> list[dict[str, Any]]:
    """States of a critic that is exact, but for ``bias`` in the last fifth of responses."""
    return [
        {
            "step": step,
            "pair": 100 * step + number // 2,
            "place": (number // 2 % 10) / 10,
            "value": number % 7 / 7 + (bias if number // 2 % 10 >= 8 else 0),
            "true_value": number % 7 / 7,
            "error": 0.01,
        }
        for step in steps
        for number in range(80)
    ]


def test_each_half_of_the_checks_has_a_line_by_place() -> None:
    section = build_true_value_section(states_of([8, 16, 24], bias=0.5))
    charts = {chart.title: chart for chart in section.charts if chart}
    assert list(charts) == [
        "True values against the critic's values, steps 16 to 24",
        *TITLES.values(),
    ]
    over_values = charts.pop(next(iter(charts))).data["lines"]
    assert [len(line["x"]) for line in over_values] == [160, 2]
    assert over_values[0]["half"][0] == pytest.approx(0.0196)
    for chart in charts.values():
        assert [line["label"] for line in chart.data["lines"]] == ["step 8", "steps 16 to 24"]
        assert chart.data["lines"][1]["x"] == [0.1, 0.3, 0.5, 0.7, 0.9]
    errors = charts[TITLES["error"]].data["lines"][0]["y"]
    assert errors == pytest.approx([0, 0, 0, 0, 0.25], abs=1e-3)
    assert charts[TITLES["ranking"]].data["lines"][0]["y"] == [1, 1, 1, 1, 1]


def test_a_damaged_line_is_refused_by_its_place(tmp_path: Path) -> None:
    state = {"phase": "ppo", "step": 8, "pair": 1, "place": 0.5, "value": 0.1, "true_value": 0.2}
    path = tmp_path / "critic.jsonl"
    path.write_text(json.dumps(state | {"error": 0.1}) + "\n" + json.dumps(state) + "\n")
    with pytest.raises(CheckpointError, match="line 2: error is missing"):
        list(read_json_lines(path, CRITIC_STATE))
