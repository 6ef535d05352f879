"""The section of a run's report that shows what ``python -m rlhf.evaluate`` has found."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlhf.tracking.report.charts import Line, line_chart
from rlhf.tracking.report.markup import Markup, joined, tag
from rlhf.tracking.report.page import scrolled, section

EVALUATION = Path("evaluation") / "evaluation.json"
# Columns of the table of models: the title, and the figure.
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


def table_rows(
    found: Mapping[str, Any], titles: Sequence[str] = tuple(COLUMNS)
) -> list[dict[str, object]]:
    """Return a row for each model and decoder, with the figures of ``titles`` that any has."""
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


def win_rows(found: Mapping[str, Any]) -> list[dict[str, object]]:
    """Return a row for each pair of models."""
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


def evaluation_section(run_dir: Path) -> Markup:
    """Return the section; empty without an evaluation."""
    path = run_dir / EVALUATION
    if not path.is_file():
        return Markup()
    found = json.loads(path.read_text(encoding="utf-8"))
    parts = [_table("Models", table_rows(found)), _table("Win rates by score", win_rows(found))]
    if "reward_model" in found:
        parts.append(tag("div", _calibration(found["reward_model"]), class_="charts"))
    return section("Evaluation", joined(*parts))


def _calibration(figures: Mapping[str, Any]) -> Markup:
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


def _table(title: str, rows: Sequence[Mapping[str, object]]) -> Markup:
    if not rows:
        return Markup()
    head = tag("thead", tag("tr", *(tag("th", key, scope="col") for key in rows[0])))
    body = tag("tbody", *(tag("tr", *(tag("td", str(v)) for v in row.values())) for row in rows))
    return scrolled(title, tag("table", tag("caption", title), head, body))
