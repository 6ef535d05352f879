"""Build the charts of a run's report: over-optimisation, and all metrics."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from itertools import cycle
from pathlib import Path
from textwrap import shorten
from typing import Any, NamedTuple

from rlhf.base.intervals import NORMAL_QUANTILE
from rlhf.config.choices import ModelInit, RewardKind
from rlhf.config.freeze import read_command
from rlhf.methods import Part, installed_methods, parts_of
from rlhf.report.charts import (
    FEWEST_JOINED,
    Chart,
    Flag,
    Line,
    Point,
    PointsByMetric,
    RunFiles,
    line_chart,
    number_text,
)
from rlhf.run.metric_table import METRICS, PANELS, Panel, documented_name, panels_for_metrics
from rlhf.run.step_alarms import Alarm

BESIDE_TONES = (5, 6, 4, 7)  # colours of the lines of other runs, the same in every chart
MOST_FIRST = 6  # most charts of the first section
MOST_BARS = 100  # a curve of more points is drawn without intervals and names
LONGEST_TITLE = 120  # characters of overrides in a title
UNTITLED = ("-", "run_dir=", "seed=", "tracking", "plan=", "hydra.")  # they change no result
# Labels of the x axis by the first part of a metric's name; other metrics get PPO's label.
X_LABELS = {"sft": "SFT step", "reward": "reward model step", "ppo": "PPO step", "dpo": "DPO step"}


class ChartSection(NamedTuple):
    """Charts under a title, with a note; None stands for a chart without points.

    The page's browser of samples also shows ``answers``, lists of samples by their title.
    """

    title: str
    charts: Sequence[Chart | None]
    note: str = ""
    answers: Mapping[str, Sequence[Mapping[str, Any]]] = {}


class ReportPart(Part):
    """Base class of what a method adds to the report of a run; by default it adds nothing."""

    def sections(self, run: RunFiles) -> Sequence[ChartSection]:  # noqa: ARG002
        """Return sections to add to the report: charts, and answers for the browser of samples."""
        return []

    def doubts(self, phases: Mapping[str, Mapping[str, Any]]) -> Sequence[str]:  # noqa: ARG002
        """Return a line for each reason to doubt the results of ``phases``."""
        return []


def report_parts() -> list[ReportPart]:
    """Return the report parts of all installed methods, also of methods that the run lacks."""
    return parts_of(ReportPart, (method.report() for method in installed_methods()))


def over_optimisation_section(run: RunFiles) -> ChartSection:
    """Return charts of the score and the gold score over sqrt(KL) (Gao et al. 2023, section 3)."""
    spread = run.series.get("ppo/score_std", ())
    quantile = NORMAL_QUANTILE / math.sqrt(run.config["ppo.rollout_batch_size"])
    halves = {step: quantile * std for step, std in spread if math.isfinite(std)}
    kl = "ppo/kl_to_reference"
    rollouts = _curve_over_kl("rollouts", run.series, "ppo/score_mean", kl, halves)
    held_out = _curve_over_kl("held-out", run.series, "ppo/eval_score", "ppo/eval_kl")
    gold = _curve_over_kl("gold", run.series, "ppo/eval_gold", "ppo/eval_kl")
    label = "square root of KL to the reference"
    charts = [
        line_chart("Score that PPO maximises", [rollouts, held_out], x_label=label),
        line_chart("Gold score, held-out", [gold], x_label=label),
    ]
    title = "Over-optimisation" if gold.points else "Score over KL"
    return ChartSection(title, charts, "Bars are 95 % intervals.")


def run_title(folder: Path, config: Mapping[str, Any]) -> str:
    """Return what tells a run apart: the overrides of its command, and its seed."""
    words = [word for word in read_command(folder) if not word.startswith(UNTITLED)]
    return f"{shorten(' '.join(words), LONGEST_TITLE) or config['name']}, seed {config['seed']}"


def describe_scores(run: RunFiles) -> str:
    """Return sentences on what scores measure and what shows over-optimisation; "" without PPO."""
    if "ppo/score_mean" not in run.series:
        return ""
    kinds = {
        key.split(".")[1]: value
        for key, value in run.config.items()
        if re.fullmatch(r"rewards\..*\.kind", key) and run.config.get(f"{key[:-5]}.weight") != 0
    }
    named = f"{', '.join(map(repr, kinds))} of rewards" if kinds else "the reward model"
    text = f"Score: by {named}, which PPO maximises."
    if "ppo/eval_gold" not in run.series:
        return f"{text} Only the samples show whether higher scores are deserved."
    text += " Gold, 0 to 1: by a rule that knows the right answers."
    has_gold_scorer = not kinds and run.config["reward_model.init"] == ModelInit.gold
    if has_gold_scorer or RewardKind.gold in kinds.values():
        return f"{text} PPO is trained on it here, so it shows no exploitation."
    return f"{text} PPO does not see it: if the score rises while this falls, PPO over-optimises."


def line_or_dots(label: str, points: Sequence[Point]) -> Line:
    """Return a line through measured points or, if these are few, dots that are not joined."""
    return Line(label, points, is_joined=len(points) >= FEWEST_JOINED)


def x_axis_label(metric: str) -> str:
    """Return the x axis label of a metric's chart; charts with equal labels zoom together."""
    return X_LABELS.get(metric.partition("/")[0], X_LABELS["ppo"])


def _curve_over_kl(
    label: str,
    series: PointsByMetric,
    metric: str,
    kl_metric: str,
    halves: Mapping[float, float] | None = None,
) -> Line:
    """Return a curve of points (sqrt(KL), value) of a metric, sorted by KL.

    ``halves`` are half-widths of intervals by step. If the curve has at most ``MOST_BARS`` points,
    each has its interval in ``halves`` and is named by its step, which the x axis does not show.
    """
    kls = dict(series.get(kl_metric, ()))
    sorted_points = sorted(
        (math.sqrt(max(kls[step], 0.0)), value, step)
        for step, value in series.get(metric, ())
        if math.isfinite(kls.get(step, math.nan))
    )
    # Not joined: KL rises and falls from step to step, so a line would run back and forth.
    line = Line(label, [(x, value) for x, value, _ in sorted_points], is_joined=False)
    if len(sorted_points) > MOST_BARS:
        return line
    names = [f"step {step:g}, square root of KL {number_text(x)}" for x, _, step in sorted_points]
    half = [halves.get(step, 0.0) for _, _, step in sorted_points] if halves else ()
    return line._replace(names=names, half=half)


def panel_sections(run: RunFiles) -> list[ChartSection]:
    """Return a section of charts for each section of ``PANELS``, reward parts included.

    The first section has at most ``MOST_FIRST`` charts, two full rows; the next has the others.
    """
    first, second, *others = (
        ChartSection(title, [chart for panel in panels if (chart := _panel_chart(run, panel))])
        for title, panels in panels_for_metrics(run.series).items()
    )
    second = second._replace(charts=[*first.charts[MOST_FIRST:], *second.charts])
    return [first._replace(charts=first.charts[:MOST_FIRST]), second, *others]


def _panel_chart(run: RunFiles, panel: Panel) -> Chart | None:
    labels = panel.labels or ("this run" if run.beside else panel.title,)
    lines = [
        line_or_dots(label, run.series[name])
        for name, label in zip(panel.metrics, labels, strict=True)
        # Except for the first metric, skip a line that stays 0: its option is switched off.
        if name in run.series and (name == panel.metrics[0] or any(y for _, y in run.series[name]))
    ]
    lines += [
        line_or_dots(other, series[panel.metrics[0]])._replace(setting=tone)
        for tone, (other, series) in zip(cycle(BESIDE_TONES), run.beside.items(), strict=False)
        if panel.metrics[0] in series
    ]
    first_metric = METRICS[documented_name(panel.metrics[0])]
    flags = [
        Flag(alarm.step, f"{alarm.name} at step {alarm.step}", alarm_element_id(alarm))
        for alarm in run.alarms
        if alarm.metric in panel.metrics
    ]
    unit = "" if first_metric.unit in {"1", panel.title.lower()} else first_metric.unit
    return line_chart(
        panel.title,
        lines,
        x_label=x_axis_label(panel.metrics[0]),
        unit=unit,
        healthy=first_metric.healthy_range,
        flags=flags,
    )


def other_metric_charts(run: RunFiles) -> list[Chart]:
    """Return the charts of the metrics that no panel shows."""
    shown = {name for panels in PANELS.values() for panel in panels for name in panel.metrics}
    others = [Panel(name, (name,)) for name in METRICS if name in run.series and name not in shown]
    return [chart for panel in others if (chart := _panel_chart(run, panel))]


def alarm_element_id(alarm: Alarm) -> str:
    """Return the id of the page element that shows ``alarm``."""
    return f"alarm-{alarm.name}"
