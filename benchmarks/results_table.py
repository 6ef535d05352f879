"""A table of run directories, one row per recipe, its seeds together.

    python benchmarks/results_table.py runs/a runs/b ...

Gold scores, KL and seconds are means over the seeds; the gain's least and largest stand beside it.
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

COLUMNS = "| recipe | seeds | gold, SFT | gold, after | gain (least to largest) | KL, nats | s |"


def measures(run_dir: Path) -> tuple[str, dict[str, Any]]:
    """Recipe of a run, and the result of its last phase."""
    config = OmegaConf.load(run_dir / "config.yaml")
    phases = json.loads((run_dir / "result.json").read_text())["phases"]
    return str(config.experiment), phases[list(phases)[-1]]


def row(recipe: str, runs: list[dict[str, Any]], suffix: str = "after") -> str:
    """One line of Markdown."""
    gold = [run[f"gold_{suffix}"] for run in runs]
    gains = [after - run["gold_before"] for after, run in zip(gold, runs, strict=True)]
    mean = statistics.fmean
    cells = [
        recipe,
        str(len(runs)),
        f"{mean(run['gold_before'] for run in runs):.3f}",
        f"{mean(gold):.3f}",
        f"{mean(gains):.3f} ({min(gains):.3f} to {max(gains):.3f})",
        f"{mean(run[f'kl_{suffix}'] for run in runs):.1f}",
        f"{mean(run['seconds'] for run in runs):.0f}",
    ]
    return f"| {' | '.join(cells)} |"


def table(run_dirs: Iterable[Path]) -> str:
    """The whole table; a moving average of the actor has a row of its own."""
    recipes: defaultdict[str, list[dict[str, Any]]] = defaultdict(list)
    for run_dir in run_dirs:
        recipe, result = measures(run_dir)
        recipes[recipe].append(result)
    lines = [COLUMNS, "| --- | ---: | ---: | ---: | ---: | ---: | ---: |"]
    for recipe, runs in recipes.items():
        lines.append(row(f"`{recipe}`", runs))
        if all("gold_after_ema" in run for run in runs):
            lines.append(row(f"`{recipe}`, averaged actor", runs, "after_ema"))
    return "\n".join(lines)


if __name__ == "__main__":
    print(table(map(Path, sys.argv[1:])))
