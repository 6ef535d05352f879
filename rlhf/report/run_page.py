"""Write ``report.html`` of a run: verdict, curves, alarms, samples, time, memory and settings.

The page is one file that loads nothing. It is made only from files in the run directory, so a run
that crashed has a report too. Text of models and data is escaped.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rlhf.base.atomic import write_text_atomically
from rlhf.base.packaged_yaml import read_yaml_beside
from rlhf.base.program import launch_command
from rlhf.base.stored_files import ANSWERS, EVALUATION
from rlhf.base.user_paths import relative_to_cwd
from rlhf.config.freeze import read_command
from rlhf.options.rollout_log.report import rollout_sections
from rlhf.report.alarms import find_doubts
from rlhf.report.charts import Chart, Line, RunFiles, line_chart, read_run_files
from rlhf.report.first_screen import build_tiles, count_held_out, read_verdict
from rlhf.report.page import render_template
from rlhf.report.run_charts import (
    alarm_element_id,
    describe_scores,
    other_metric_charts,
    over_optimisation_section,
    panel_sections,
    report_parts,
    run_title,
)
from rlhf.report.summary import (
    find_changed_answers,
    replaced_kernel_lines,
    summary_blocks,
    summary_title,
)
from rlhf.run.step_alarms import Alarm

REPORT = "report.html"
MOST_PROMPTS = 12  # most prompts for which answers are shown side by side
MOST_MODELS = 4  # most models in one chart
# Title of a column -> key of its value in a row of figures (model_rows).
MODEL_COLUMNS: Mapping[str, str] = read_yaml_beside(__file__, "model_columns.yaml")


def write_report(run_dir: Path) -> Path:
    """Write the report of the run in ``run_dir``, finished or not; return its path."""
    path = run_dir / REPORT
    write_text_atomically(path, run_page(read_run_files(run_dir)))
    return path


def run_page(run: RunFiles) -> str:
    """Return the HTML of a run's report."""
    result = run.result
    words = read_command(run.folder)
    first, *panels = panel_sections(run)
    sections = [first, over_optimisation_section(run), *panels, *rollout_sections(run)]
    for part in report_parts():
        sections += part.sections(run)
    answers = {"held-out prompts": run.samples}
    for section in sections:
        answers |= section.answers
    return render_template(
        "run.html",
        scripts=["tokens.js", "samples.js"],
        title=run_title(run.folder, run.config),
        verdict=read_verdict(run),
        subtitle=relative_to_cwd(run.folder.resolve()),
        run=run,
        tiles=[*build_tiles(run)],
        answers={title: rows for title, rows in answers.items() if rows},
        changed=find_changed_answers(run.samples),
        scores=describe_scores(run),
        num_prompts=count_held_out(run),
        results=[] if result is None else list(summary_blocks(result)),
        objective="" if result is None else summary_title(result, run.alarms),
        kernels=[] if result is None else replaced_kernel_lines(result),
        evaluation=read_evaluation(run.folder),
        alarms=[(alarm, _step_of_last_samples(run, alarm)) for alarm in run.alarms],
        doubts=[] if result is None else find_doubts(result["phases"], run.series),
        alarm_element_id=alarm_element_id,
        sections=[section for section in sections if any(section.charts)],
        other_charts=other_metric_charts(run),
        command=launch_command(words) if words else "",
        versions=(result or {}).get("versions", {}),
        settings={key: json.dumps(value) for key, value in run.config.items()},
    )


def _step_of_last_samples(run: RunFiles, alarm: Alarm) -> int | None:
    steps = [sample["step"] for sample in run.samples if sample["phase"] == alarm.phase]
    return max((step for step in steps if step <= alarm.step), default=None)


def model_rows(
    evaluation: Mapping[str, Any], titles: Sequence[str] = tuple(MODEL_COLUMNS)
) -> list[dict[str, object]]:
    """Return a row per model and decoder, with those columns of ``titles`` that are not empty."""
    rows: list[dict[str, object]] = []
    for name, results in evaluation["models"].items():
        for decoder, figures in results["decoders"].items():
            values = figures | {"perplexity": results.get("perplexity")}
            values["right"] = figures.get("pass_at", {}).get("1")
            cells = {title: values.get(key) for title, key in MODEL_COLUMNS.items()}
            rows.append({"model": name, "decoder": decoder} | cells)
    used = [title for title in titles if any(row[title] is not None for row in rows)]
    return [
        {"model": row["model"], "decoder": row["decoder"]}
        | {title: "" if row[title] is None else f"{row[title]:.3f}" for title in used}
        for row in rows
    ]


def win_rate_rows(evaluation: Mapping[str, Any]) -> list[dict[str, object]]:
    """Return a row for each pair of models: win rate, interval, and win rate at equal length."""
    return [
        {
            "model": rate["model"],
            "against": rate["against"],
            "wins": f"{rate['rate']:.3f}",
            "95 % interval": "{:.3f} to {:.3f}".format(*rate["ci"]),
            "at equal length": f"{rate['controlled']:.3f}",
        }
        for rate in evaluation["win_rates"]
    ]


class Evaluation(NamedTuple):
    """The tables and charts of a run's evaluation, for a section of the report."""

    models: list[dict[str, object]]
    wins: list[dict[str, object]]
    charts: list[Chart | None]
    side_by_side: list[dict[str, object]]


def read_evaluation(run_dir: Path) -> Evaluation | None:
    """Return the tables and charts of RUN_DIR/evaluation; None if the run was not evaluated."""
    if (stored := EVALUATION.read(run_dir)) is None:
        return None
    answers = list(ANSWERS.read_lines(run_dir))
    charts = [_score_chart(answers, list(stored["models"])[:MOST_MODELS])]
    if "reward_model" in stored:
        charts.append(_calibration_chart(stored["reward_model"]))
    tables = (model_rows(stored), win_rate_rows(stored))
    return Evaluation(*tables, charts, _side_by_side_rows(answers))


def _score_chart(answers: Sequence[Mapping[str, Any]], models: Sequence[str]) -> Chart | None:
    lines = []
    for name in models:
        scores = sorted(
            row["score"]
            for row in answers
            if (row["model"], row["decoder"]) == (name, "sampled") and row["score"] is not None
        )
        points = [((rank + 0.5) / len(scores), score) for rank, score in enumerate(scores)]
        lines.append(Line(name, points))
    return line_chart("Scores, from the lowest to the highest", lines, x_label="share of answers")


def _side_by_side_rows(answers: Sequence[Mapping[str, Any]]) -> list[dict[str, object]]:
    """Return a row per prompt, for few prompts: first answer and score per model and decoder."""
    rows: dict[str, dict[str, object]] = {}
    for answer in answers:
        prompt = answer["prompt"].strip()
        if answer["sample"] == 0 and (prompt in rows or len(rows) < MOST_PROMPTS):
            row = rows.setdefault(prompt, {"prompt": prompt})
            score = "not finite" if answer["score"] is None else f"{answer['score']:.2f}"
            shown = f"{answer['response'].strip()} (score {score})"
            row[f"{answer['model']}, {answer['decoder']}"] = shown
    return list(rows.values())


def _calibration_chart(figures: Mapping[str, Any]) -> Chart | None:
    points = [(part["certainty"], part["right"]) for part in figures["calibration"]]
    return line_chart(
        f"Calibration of the reward model: {figures['accuracy']:.1%} of {figures['pairs']} pairs "
        "ranked correctly",
        [
            Line("share that was right", points, is_joined=False),
            Line("calibrated", [(0.5, 0.5), (1.0, 1.0)]),
        ],
        x_label="certainty",
    )
