"""Show the logged responses in the report: one by one, and their spread over steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import quantiles
from typing import Any

from rlhf.base.stored_files import LINE, MAYBE_FLOAT, OTHERS, Form, read_json_lines
from rlhf.options.rollout_log.keys import LOG
from rlhf.report.charts import MOST_SAMPLES, Chart, Line, RunFiles, line_chart
from rlhf.report.run_charts import ChartSection

RESPONSE: Form = {**LINE, "prompt": str, "response": str, "ended": bool, OTHERS: MAYBE_FLOAT}
TITLES = {"score": "Scores of a step's responses", "tokens": "Lengths of a step's responses"}
TENTHS = 10  # the band reaches from the end of the first tenth to the start of the last


def rollout_sections(run: RunFiles) -> Sequence[ChartSection]:
    """Return a section with the spread of scores and lengths over steps, and the last responses.

    Responses to one prompt are shown side by side.
    """
    rows = list(read_json_lines(run.folder / LOG, RESPONSE))
    charts = [_spread_chart(rows, name) for name in TITLES]
    answers = {"responses that PPO learned from": rows[-MOST_SAMPLES:]}
    return [ChartSection("Spread of responses", charts, answers=answers)]


def _spread_chart(rows: Sequence[Mapping[str, Any]], name: str) -> Chart | None:
    """Return a chart of each step's median of ``name``, with a band for the middle 80 %."""
    by_step: dict[int, list[float]] = {}
    for row in rows:
        if row[name] is not None:
            by_step.setdefault(row["step"], []).append(row[name])
    cuts = {
        step: quantiles(values, n=TENTHS, method="inclusive")
        for step, values in by_step.items()
        if len(values) > 1
    }
    line = Line(
        "median, with a band for the middle 80 %",
        [(step, each[TENTHS // 2 - 1]) for step, each in cuts.items()],
        low=[each[0] for each in cuts.values()],
        high=[each[-1] for each in cuts.values()],
    )
    return line_chart(TITLES[name], [line], x_label="PPO step")
