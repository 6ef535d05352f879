"""Curves of several runs: the mean and the range of the seeds, in one page."""

from __future__ import annotations

import json
import math
import re
from html import unescape
from pathlib import Path

import pytest
from omegaconf import DictConfig

from rlhf.config.freeze import to_run_config, write_frozen_config
from rlhf.report import __main__ as report
from rlhf.report.charts import PointsByMetric, line_chart
from rlhf.report.sweep_charts import MOST_STEPS, seed_mean_line
from tests.conftest import Compose
from tests.documents import read_document


def test_band_is_the_range_of_the_seeds_at_steps_that_all_have() -> None:
    runs: list[PointsByMetric] = [
        {"m": [(1, 1.0), (2, 2.0), (3, 9.0)]},
        {"m": [(1, 2.0), (2, 6.0)]},
        {"other": []},
    ]
    line = seed_mean_line(4, runs, "m")
    assert (line.label, line.setting) == ("5", 4)
    assert line.points == [(1, 1.5), (2, 4.0)]
    assert (line.low, line.high) == ([1.0, 2.0], [2.0, 6.0])
    assert not line.is_joined, "two points"
    assert line.runs == [[1.0, 2.0], [2.0, 6.0]]
    few, alone = (
        seed_mean_line(0, [{"m": [(step, 1.0) for step in range(steps)]}], "m") for steps in (5, 6)
    )
    assert (few.is_joined, alone.is_joined) == (False, True), "a line suggests values between"
    assert (alone.low, alone.runs) == ((), [])
    gap = seed_mean_line(0, [{"m": [(1, math.nan), (2, y)]} for y in (3.0, 5.0)], "m")
    chart = line_chart("t", [gap])
    assert chart is not None
    assert chart.data["lines"][0]["runs"] == [[3], [5]], "where the mean is finite"
    assert not seed_mean_line(0, runs, "missing").points


def test_many_steps_are_drawn_as_means_with_their_range() -> None:
    run = {"m": [(step, float(step % 2)) for step in range(10 * MOST_STEPS)]}
    line = seed_mean_line(0, [run], "m")
    assert len(line.points) == MOST_STEPS
    assert {y for _, y in line.points} == {0.5}
    assert (set(line.low), set(line.high)) == ({0.0}, {1.0})


def write_run(folder: Path, config: DictConfig, scores: list[float]) -> Path:
    """Write the directory of a run that has not finished, with a score for each step."""
    folder.mkdir()
    write_frozen_config(to_run_config(config), folder)
    lines = [
        {"phase": "ppo", "step": step, "ppo/dual_clipfrac": 0.0}
        | dict.fromkeys(("ppo/score_mean", "ppo/eval_score"), score)
        for step, score in enumerate(scores, 1)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def test_command_draws_runs_in_one_chart(
    compose: Compose, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = write_run(tmp_path / "a", compose(["seed=1"]), [0.25] * 3)
    again = write_run(tmp_path / "b", compose(["seed=2"]), [0.75] * 3)
    other = write_run(tmp_path / "c", compose(["ppo.kl_ctl=0.5"]), [2.0] * 3)
    path = tmp_path / "page.html"
    assert report.main([*map(str, (first, again, other)), "--html", str(path)]) == 0
    assert f"wrote {path}" in capsys.readouterr().out
    text = path.read_text()
    legend = unescape(re.sub("<[^>]*>", "", text.partition('class="legend"')[2])).split("\n")
    told = [line for line in legend if "kl_ctl" in line]
    folder = tmp_path.name
    assert told == [f"1 ppo.kl_ctl=0.28 {folder}/a, {folder}/b", f"2 ppo.kl_ctl=0.5 {folder}/c"]
    drawn = [json.loads(unescape(data)) for data in re.findall("data-chart='([^']*)'", text)]
    assert [[line["y"][0] for line in chart["lines"]] for chart in drawn] == 2 * [[0.5, 2]]
    assert drawn[0]["lines"][0]["low"] == [0.25] * 3

    assert report.main([*map(str, (first, again, other)), "--json"]) == 0
    found = read_document("report", capsys.readouterr().out)
    assert found["settings"][1]["values"] == {"ppo.kl_ctl": 0.5}
    assert (found["reference"], found["differences"]) == (None, [])
    assert report.main([str(first), "--html", str(tmp_path / "none" / "page.html")]) == 2
    assert "--html" in capsys.readouterr().err
