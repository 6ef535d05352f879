"""Write ``report.html`` of a run: verdict, curves, alarms, samples, time, memory and settings.

The page is one file that loads nothing, and it is made from the files in the run directory alone,
so that a run that crashed has one too. Text of models and data is escaped.
"""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rlhf.atomic import replacing
from rlhf.config.freeze import COMMAND, frozen_keys
from rlhf.tracking.alarms import alarms_of
from rlhf.tracking.jsonl import read_jsonl
from rlhf.tracking.metric_table import METRICS, entry_of
from rlhf.tracking.report.charts import Flag, Line, Point, line_chart
from rlhf.tracking.report.markup import Markup, joined, tag
from rlhf.tracking.report.page import document, scrolled, section
from rlhf.tracking.report.panels import PANELS, Panel, panels_of
from rlhf.tracking.step_alarms import Alarm, read_alarms
from rlhf.tracking.summary import summary_parts

REPORT = "report.html"
MOST_SAMPLES = 4000  # the latest samples that the page holds
MOST_BARS = 100  # intervals in one chart
MOST_TOKENS = 500  # dots in the chart of the critic
PHASES = ("sft", "reward", "dpo", "ppo")

Series = Mapping[str, Sequence[Point]]  # (step, value) of every metric


class RunFiles(NamedTuple):
    """What the files of a run directory hold."""

    folder: Path
    config: Mapping[str, Any]
    series: Series
    samples: Sequence[Mapping[str, Any]]
    alarms: Sequence[Alarm]
    result: Mapping[str, Any] | None  # None: the run has not finished


def write_report(run_dir: Path) -> Path:
    """Write the report of the run in ``run_dir``, finished or not; return its path.

    Raises:
        CheckpointError: if ``run_dir`` is not the directory of a run.
    """
    path = run_dir / REPORT
    page = run_page(read_files(run_dir))
    with replacing(path) as building:
        building.write_text(page, encoding="utf-8")
    return path


def read_files(run_dir: Path) -> RunFiles:
    """Read what a run has written so far; a torn last line is left out."""
    result = run_dir / "result.json"
    series: dict[str, list[Point]] = {}
    for line in read_jsonl(run_dir / "metrics.jsonl"):
        for name, value in line.items():
            if entry_of(name) in METRICS:
                point = (line["step"], math.nan if value is None else value)
                series.setdefault(name, []).append(point)
    return RunFiles(
        folder=run_dir,
        config=frozen_keys(run_dir),
        series=series,
        samples=list(read_jsonl(run_dir / "samples.jsonl"))[-MOST_SAMPLES:],
        alarms=read_alarms(run_dir),
        result=json.loads(result.read_text()) if result.is_file() else None,
    )


def run_page(run: RunFiles) -> str:
    """Return the page of a run."""
    title = f"{run.config['name']}, seed {run.config['seed']}"
    body = joined(
        tag("header", tag("h1", title), _verdict(run), tag("p", str(run.folder), class_="path")),
        tag(
            "main",
            _results(run),
            _doubts(run),
            _optimisation(run),
            *_curves(run),
            _critic(run),
            _samples(run),
            _rest(run),
            _settings(run),
        ),
    )
    return document(title, body, script="samples.js")


def _verdict(run: RunFiles) -> Markup:
    """Return one line: what the run reached, and how many reasons there are to doubt it."""
    if run.result is None:
        phases = [name for name in PHASES if (run.folder / name / "result.json").exists()]
        done = f"finished phases: {', '.join(phases)}" if phases else "no phase finished"
        return tag("p", f"This run has not finished; {done}.", class_="verdict doubtful")
    doubts = len(run.alarms) + len(alarms_of(run.result["phases"]))
    ppo = run.result["phases"].get("ppo", {})
    reached = f"objective {run.result['objective']:.3f}"
    if "exact_after" in ppo:
        reached = f"exactly right {ppo['exact_before']:.1%} → {ppo['exact_after']:.1%}, {reached}"
    told = f"{doubts} reason{'s' if doubts > 1 else ''} to doubt it" if doubts else "no alarms"
    return tag("p", f"{reached}; {told}", class_="verdict doubtful" if doubts else "verdict")


def _results(run: RunFiles) -> Markup:
    """Return the table of the summary: measures before and after each phase."""
    if run.result is None:
        return Markup()
    titles = ("phase", "measure", "before", "after", "time")
    rows = [
        tag(
            "tr",
            tag("td", "" if number else part.name),
            tag("td", row.measure.strip(), class_="sub" if row.measure[0] == " " else None),
            *(tag("td", cell, class_="number") for cell in (row.before, row.after)),
            tag("td", "" if number else part.duration, class_="number"),
        )
        for part in summary_parts(run.result)
        for number, row in enumerate(part.rows)
    ]
    head = tag("thead", tag("tr", *(tag("th", title, scope="col") for title in titles)))
    return section("Results", scrolled("Results", tag("table", head, tag("tbody", *rows))))


def _doubts(run: RunFiles) -> Markup:
    """Return the alarms, each with a link target for its flag, and the doubts about the result."""
    ends = [] if run.result is None else alarms_of(run.result["phases"])
    items = [
        tag("li", alarm.line, " ", *_link_to_samples(run, alarm), id=_target(alarm))
        for alarm in run.alarms
    ]
    items += [tag("li", line) for line in ends]
    if not items:
        return Markup()
    return section("Reasons to doubt this run", tag("ul", *items, class_="doubts"))


def _link_to_samples(run: RunFiles, alarm: Alarm) -> Iterator[Markup]:
    """Yield a link to the last samples before an alarm, if there are any."""
    steps = [s["step"] for s in run.samples if s["phase"] == alarm.phase]
    before = [step for step in steps if step <= alarm.step]
    if before:
        step = max(before)
        yield tag("a", f"Samples of step {step}", href="#samples-title", data_step=step)


def _optimisation(run: RunFiles) -> Markup:
    """Return score and gold score over the square root of KL (Gao et al. 2023, section 3)."""
    per_step = run.config["ppo.rollout_batch_size"]
    rollouts = _over_kl(run.series, "ppo/score_mean", "ppo/kl_to_reference")
    spread = [1.96 * std / math.sqrt(per_step) for _, std in run.series.get("ppo/score_std", ())]
    held_out = _over_kl(run.series, "ppo/eval_score", "ppo/eval_kl")
    gold = _over_kl(run.series, "ppo/eval_gold", "ppo/eval_kl")
    halves = spread if len(spread) == len(rollouts) <= MOST_BARS else ()
    label = "square root of KL to the reference"
    charts = [
        line_chart(
            "Score that PPO maximises",
            [Line("rollouts", rollouts, halves), Line("held-out", held_out)],
            x_label=label,
        ),
        line_chart("Gold score, held-out", [Line("gold", gold)], x_label=label),
    ]
    if not any(charts):
        return Markup()
    note = tag(
        "p",
        "A score that rises while the gold score falls is over-optimisation. "
        "Bars are 95 % intervals.",
        class_="note",
    )
    return section("Over-optimisation", note, tag("div", *charts, class_="charts"))


def _over_kl(series: Series, name: str, kl: str) -> list[Point]:
    """Return the values of a metric over the square root of KL, by rising KL."""
    kls = dict(series.get(kl, ()))
    points = [(kls[step], value) for step, value in series.get(name, ()) if step in kls]
    return sorted((math.sqrt(max(at, 0.0)), value) for at, value in points if math.isfinite(at))


def _critic(run: RunFiles) -> Markup:
    """Return returns over values at the tokens of the last answers; an exact critic is on the line.

    The return is that of GAE: advantage plus value.
    """
    answers = [s for s in run.samples if "token_advantages" in s and s["model"] == "actor"]
    points = [
        (value, value + advantage)
        for sample in answers
        if sample["step"] == answers[-1]["step"]
        for value, advantage in zip(sample["token_values"], sample["token_advantages"], strict=True)
        if value is not None and advantage is not None  # were not finite
    ]
    if not any(value for value, _ in points):
        return Markup()  # there is no critic
    exact = [(at, at) for at, _ in (min(points), max(points))]
    chart = line_chart(
        f"Returns over the critic's values, tokens of step {answers[-1]['step']}",
        [Line("tokens", points[-MOST_TOKENS:], is_joined=False), Line("exact", exact)],
        x_label="value before the token",
    )
    return section("Critic", tag("div", chart, class_="charts"))


def _curves(run: RunFiles) -> Iterator[Markup]:
    for title, panels in panels_of(run.series).items():
        charts = [_chart(run, panel) for panel in panels]
        if any(charts):
            yield section(title, tag("div", *charts, class_="charts"))


def _chart(run: RunFiles, panel: Panel) -> Markup:
    labels = panel.labels or (panel.title,)
    lines = [
        Line(label, run.series[name])
        for name, label in zip(panel.metrics, labels, strict=True)
        if name in run.series
    ]
    first = METRICS[entry_of(panel.metrics[0])]
    flags = [
        Flag(alarm.step, f"{alarm.name} at step {alarm.step}", _target(alarm))
        for alarm in run.alarms
        if alarm.metric in panel.metrics
    ]
    unit = "" if first.unit in {"1", panel.title.lower()} else first.unit
    return line_chart(panel.title, lines, unit=unit, healthy=first.healthy_range, flags=flags)


def _rest(run: RunFiles) -> Markup:
    """Return the metrics that no panel shows, folded."""
    shown = {name for panels in PANELS.values() for panel in panels for name in panel.metrics}
    others = [Panel(name, (name,)) for name in METRICS if name in run.series and name not in shown]
    charts = [_chart(run, panel) for panel in others]
    if not charts:
        return Markup()
    summary = tag("summary", f"All other metrics ({len(others)})")
    return tag("details", summary, tag("div", *charts, class_="charts"))


def _samples(run: RunFiles) -> Markup:
    """Return the browser of samples; the page's script fills it from the data beside it."""
    if not run.samples:
        return Markup()
    # "<" is escaped, so that no text of a model can end the element.
    data = json.dumps(run.samples, ensure_ascii=False).replace("<", "\\u003c")
    controls = tag(
        "div",
        tag("label", "Find ", Markup('<input type="search" id="find">')),
        tag("label", "Sort by ", Markup('<select id="sort"></select>')),
        tag("label", "Step ", Markup('<select id="step"></select>')),
        tag("label", "Shade tokens by ", Markup('<select id="shade"></select>')),
        tag("span", id="count", role="status"),
        class_="controls",
    )
    return tag(
        "section",
        tag("h2", "Samples", id="samples-title"),
        tag("p", "The same held-out prompts at every evaluation.", class_="note"),
        controls,
        tag("div", id="histogram", role="group", aria_label="Scores of the last answers"),
        tag("div", id="browser"),
        tag("script", Markup(data), type="application/json", id="samples"),
        tag("noscript", "The samples need scripts; samples.jsonl holds them too."),
    )


def _settings(run: RunFiles) -> Markup:
    rows = {
        key: tag("tr", tag("th", key, scope="row"), tag("td", json.dumps(value)))
        for key, value in run.config.items()
    }
    versions = (run.result or {}).get("versions", {})
    note = tag("p", ", ".join(f"{name} {version}" for name, version in versions.items()))
    command = run.folder / COMMAND
    words = shlex.split(command.read_text()) if command.exists() else []
    typed = tag("pre", shlex.join(words)) if words else Markup()
    keys = {word.partition("=")[0].lstrip("+") for word in words}
    differing = [row for key, row in rows.items() if key in keys]
    parts = {"Set by the command instead of a preset": differing, "All settings": rows.values()}
    tables = [
        scrolled(title, tag("table", tag("caption", title), tag("tbody", *part)))
        for title, part in parts.items()
        if part
    ]
    return tag("details", tag("summary", f"Settings ({len(rows)} keys)"), typed, note, *tables)


def _target(alarm: Alarm) -> str:
    return f"alarm-{alarm.name}"
