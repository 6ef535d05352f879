"""Draw charts that compare the critic's values with true values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rlhf.base.intervals import NORMAL_QUANTILE
from rlhf.base.stored_files import LINE, Form, read_json_lines
from rlhf.report.charts import Chart, Line, RunFiles, Tick, line_chart
from rlhf.report.run_charts import ChartSection, ReportPart, line_or_dots
from rlhf.run.metric_table import METRICS
from rlhf_lab.branches import Branches
from rlhf_lab.branches.critic_states import CriticState, measure_by_place

BINS = 5  # number of equal parts of a response in charts by place
MOST_STATES = 300  # most dots in a chart
TITLES = {
    "error": "Squared error of values",
    "ranking": "Alternative steps ranked correctly",
    "slope": "Slope of true values over values",
    "explained_variance": "Explained variance of true values",
}
NOTE = (
    "A true value is estimated by the mean return of continuations sampled from the state; sampling"
    " noise is subtracted from errors and variances. Of two alternative steps from one state, a"
    " guess finds the better one in half of the cases."
)
CRITIC_STATE: Form = {
    **LINE,
    "pair": int,
    **dict.fromkeys(("place", "value", "true_value", "error"), float),
}


class TrueValueCharts(ReportPart):
    """The report's charts of the checks of the critic."""

    def sections(self, run: RunFiles) -> Sequence[ChartSection]:
        """Return the section with charts of the states in the run's checks so far."""
        rows = read_json_lines(run.folder / str(Branches.log), CRITIC_STATE)
        return [build_true_value_section(list(rows))]


def build_true_value_section(rows: Sequence[Mapping[str, Any]]) -> ChartSection:
    """Return the section with charts of ``rows``, the lines of critic.jsonl."""
    title, parts = "Critic vs. true values", _split_into_halves(rows)
    if not parts:
        return ChartSection(title, [])
    over_values = _build_value_chart(*list(parts.items())[-1])
    measured = {label: measure_by_place(states, bins=BINS) for label, states in parts.items()}
    by_place = [_build_place_chart(measured, name) for name in TITLES]
    return ChartSection(title, [over_values, *by_place], NOTE)


def _split_into_halves(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[CriticState]]:
    """Return the states of the first and of the second half of the checks, by label."""
    steps = sorted({row["step"] for row in rows})
    first = len(steps) // 2
    halves = (steps[:first], steps[first:])
    return {
        f"step {half[0]}" if len(half) == 1 else f"steps {half[0]} to {half[-1]}": [
            CriticState(**{name: row[name] for name in CriticState._fields})
            for row in rows
            if row["step"] in half
        ]
        for half in halves
        if half
    }


def _build_value_chart(label: str, states: Sequence[CriticState]) -> Chart | None:
    shown = states[-MOST_STATES:]
    points = [(state.value, state.true_value) for state in shown]
    halves = [NORMAL_QUANTILE * state.error for state in shown]
    diagonal = [(value, value) for value in (min(points)[0], max(points)[0])]
    dots = Line("states, 95 % intervals", points, halves, is_joined=False)
    lines = [dots, Line("exact", diagonal)]
    return line_chart(f"True values against the critic's values, {label}", lines, x_label="value")


def _build_place_chart(
    measured: Mapping[str, Mapping[int, Mapping[str, float]]], name: str
) -> Chart | None:
    """Return a chart of the measure ``name`` by place, with a line for each part of the checks."""
    info = METRICS[f"ppo/critic_{name}"]
    ticks = [
        Tick((number + 0.5) / BINS, f"{100 * number // BINS}-{100 * (number + 1) // BINS} %")
        for number in range(BINS)
    ]
    lines = [
        line_or_dots(
            label,
            [
                (ticks[number].at, measures[name])
                for number, measures in by_place.items()
                if name in measures
            ],
        )
        for label, by_place in measured.items()
    ]
    return line_chart(
        TITLES[name],
        lines,
        x_label="position in the response",
        x_ticks=ticks,
        unit="" if info.unit == "1" else info.unit,
        healthy=info.healthy_range,
    )
