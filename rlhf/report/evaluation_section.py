"""Build the section of a run's report with the results of ``python -m rlhf.evaluate``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rlhf.base.stored_files import ANSWER, EVALUATED, read_json, read_lines
from rlhf.report.charts import Chart, Line, line_chart

EVALUATION = Path("evaluation") / "evaluation.json"
MOST_PROMPTS = 12  # most prompts whose answers are shown side by side
MOST_LINES = 4  # most models in one chart
# Columns of the table of models: title -> name of the figure in evaluation.json.
COLUMNS = {
    "score": "score",
    "right": "right",
    "gold": "gold/gold",
    "KL, nats": "kl",
    "tokens": "tokens",
    "ended": "ended_share",
    "distinct": "distinct_responses",
    "repeated": "repeated_share",
    "perplexity": "perplexity",
}


def model_rows(
    found: Mapping[str, Any], titles: Sequence[str] = tuple(COLUMNS)
) -> list[dict[str, object]]:
    """Return a row per model and decoder, without columns of ``titles`` that are empty in all."""
    rows: list[dict[str, object]] = []
    for name, by_decoder in found["models"].items():
        for decoder, figures in by_decoder["decoders"].items():
            values = figures | {"perplexity": by_decoder.get("perplexity")}
            values["right"] = figures.get("pass_at", {}).get("1")
            cells = {title: values.get(key) for title, key in COLUMNS.items()}
            rows.append({"model": name, "decoder": decoder} | cells)
    used = [title for title in titles if any(row[title] is not None for row in rows)]
    return [
        {"model": row["model"], "decoder": row["decoder"]}
        | {title: "" if row[title] is None else f"{row[title]:.3f}" for title in used}
        for row in rows
    ]


def win_rate_rows(found: Mapping[str, Any]) -> list[dict[str, object]]:
    """Return a row with win rate and interval for each pair of models."""
    return [
        {
            "model": each["model"],
            "against": each["against"],
            "wins": f"{each['rate']:.3f}",
            "95 % interval": "{:.3f} to {:.3f}".format(*each["ci"]),
            "at equal length": f"{each['controlled']:.3f}",
        }
        for each in found["win_rates"]
    ]


class Evaluation(NamedTuple):
    """The tables and charts of an evaluation."""

    models: list[dict[str, object]]
    wins: list[dict[str, object]]
    charts: list[Chart | None]
    side_by_side: list[dict[str, object]]


def read_evaluation(run_dir: Path) -> Evaluation | None:
    """Read RUN_DIR/evaluation; return the section's tables and charts, or None if it is missing."""
    path = run_dir / EVALUATION
    if (found := read_json(path, EVALUATED)) is None:
        return None
    answers = list(read_lines(path.with_name("answers.jsonl"), ANSWER))
    charts = [_score_chart(answers, list(found["models"])[:MOST_LINES])]
    if "reward_model" in found:
        charts.append(_calibration_chart(found["reward_model"]))
    return Evaluation(model_rows(found), win_rate_rows(found), charts, _side_by_side(answers))


def _score_chart(answers: Sequence[Mapping[str, Any]], models: Sequence[str]) -> Chart | None:
    """Return a chart of the sorted scores of each model's sampled answers."""
    lines = []
    for name in models:
        scores = sorted(
            row["score"]
            for row in answers
            if (row["model"], row["decoder"]) == (name, "sampled") and row["score"] is not None
        )
        points = [((at + 0.5) / len(scores), score) for at, score in enumerate(scores)]
        lines.append(Line(name, points))
    return line_chart("Scores, from the lowest to the highest", lines, x_label="share of answers")


def _side_by_side(answers: Sequence[Mapping[str, Any]]) -> list[dict[str, object]]:
    """Return a row for each of the first prompts, with all its answers and their scores."""
    rows: dict[str, dict[str, object]] = {}
    for each in answers:
        prompt = each["prompt"].strip()
        if each["sample"] == 0 and (prompt in rows or len(rows) < MOST_PROMPTS):
            row = rows.setdefault(prompt, {"prompt": prompt})
            shown = f"{each['response'].strip()} ({each['score']:.2f})"
            row[f"{each['model']}, {each['decoder']}"] = shown
    return list(rows.values())


def _calibration_chart(figures: Mapping[str, Any]) -> Chart | None:
    points = [(each["certainty"], each["right"]) for each in figures["calibration"]]
    return line_chart(
        f"Calibration of the reward model: right {figures['accuracy']:.3f} of "
        f"{figures['pairs']} pairs",
        [
            Line("share that was right", points, is_joined=False),
            Line("calibrated", [(0.5, 0.5), (1.0, 1.0)]),
        ],
        x_label="certainty",
    )
