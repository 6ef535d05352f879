"""A table of run directories, one row per recipe, its seeds together.

    python benchmarks/results_table.py runs/a runs/b ...

Every figure is a mean over the seeds; seconds are those of the last phase.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

COLUMNS = (
    "recipe",
    "seeds",
    "exactly right, before",
    "after (least to largest)",
    "greedy, before",
    "after",
    "gold, before",
    "after (least to largest)",
    "KL, nats",
    "s",
)


def measures(run_dir: Path) -> tuple[str, dict[str, Any]]:
    """Recipe of a run, and the result of its last phase."""
    config = OmegaConf.load(run_dir / "config.yaml")
    phases = json.loads((run_dir / "result.json").read_text())["phases"]
    return str(config.experiment), phases[list(phases)[-1]]


def row(recipe: str, runs: list[dict[str, Any]], suffix: str = "after") -> str:
    """Return one line of Markdown; of an averaged actor only the gold score and KL are measured."""

    def mean(name: str) -> str:
        return f"{statistics.fmean(run[name] for run in runs):.3f}" if name in runs[0] else "-"

    def spread(name: str) -> str:
        values = [run[name] for run in runs if name in run]
        return f"{mean(name)} ({min(values):.2f} to {max(values):.2f})" if values else "-"

    cells = [
        recipe,
        str(len(runs)),
        mean("exact_before"),
        spread(f"exact_{suffix}"),
        mean("exact_greedy_before"),
        mean(f"exact_greedy_{suffix}"),
        mean("gold_before"),
        spread(f"gold_{suffix}"),
        f"{statistics.fmean(run[f'kl_{suffix}'] for run in runs):.1f}",
        f"{statistics.fmean(run['seconds'] for run in runs):.0f}",
    ]
    return f"| {' | '.join(cells)} |"


def table(run_dirs: Iterable[Path]) -> str:
    """The whole table; a moving average of the actor has a row of its own."""
    recipes: defaultdict[str, list[dict[str, Any]]] = defaultdict(list)
    for run_dir in run_dirs:
        recipe, result = measures(run_dir)
        recipes[recipe].append(result)
    lines = [f"| {' | '.join(COLUMNS)} |", f"| --- |{' ---: |' * (len(COLUMNS) - 1)}"]
    for recipe, runs in recipes.items():
        lines.append(row(f"`{recipe}`", runs))
        if all("gold_after_ema" in run for run in runs):
            lines.append(row(f"`{recipe}`, averaged actor", runs, "after_ema"))
    return "\n".join(lines)


if __name__ == "__main__":
    print(table(map(Path, sys.argv[1:])))
