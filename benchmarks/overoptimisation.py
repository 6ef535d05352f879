"""Score and gold score over the square root of KL: what a reward model that is pushed too far does.

    python benchmarks/overoptimisation.py docs/images/overoptimised.svg RUN_DIR [RUN_DIR ...]

Reads the evaluations of runs with ``ppo.eval_every`` (``experiment=overoptimised``), draws both
scores over the distance that https://arxiv.org/abs/2210.10760 measures in, and prints them as a
table. Needs the extra ``benchmarks`` (matplotlib).
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from common import table
from plots import OTHER, OWN, STYLE

PANELS = {"score": ("score of the reward model", OTHER), "gold": ("gold score", OWN)}
HEADER = [
    "run",
    "KL at most gold",
    *(f"{name} {when}" for name in PANELS for when in ("first", "at most gold", "last")),
]


class Evaluated(NamedTuple):
    """The policy on held-out prompts at one step."""

    kl: float  # nats per sequence
    score: float
    gold: float


def evaluations(run_dir: Path) -> list[Evaluated]:
    """Before PPO, and at every step that was evaluated."""
    ppo = json.loads((run_dir / "result.json").read_text())["phases"]["ppo"]
    lines = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    found = [Evaluated(0.0, ppo["score_before"], ppo["gold_before"])]
    found += [
        Evaluated(line["ppo/eval_kl"], line["ppo/eval_score"], line["ppo/eval_gold"])
        for line in lines
        if "ppo/eval_gold" in line
    ]
    if len(found) == 1:
        raise SystemExit(f"{run_dir}: no evaluations with a gold score; set ppo.eval_every")
    return found


def row(name: str, found: Sequence[Evaluated]) -> list[str | float | None]:
    """First, best and last of one run; the best is the one with the highest gold score."""
    moments = (found[0], max(found, key=lambda each: each.gold), found[-1])
    return [name, moments[1].kl, *(getattr(each, panel) for panel in PANELS for each in moments)]


def main(arguments: Sequence[str]) -> None:
    """Draw the runs ``arguments[1:]`` into the file ``arguments[0]``."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    runs = {Path(folder).name: evaluations(Path(folder)) for folder in arguments[1:]}
    with pyplot.rc_context(STYLE):
        figure, axes = pyplot.subplots(1, len(PANELS), figsize=(9, 3.2), layout="constrained")
        for axis, (panel, (title, colour)) in zip(axes, PANELS.items(), strict=True):
            for found in runs.values():
                distances = [math.sqrt(max(each.kl, 0.0)) for each in found]
                axis.plot(
                    distances,
                    [getattr(each, panel) for each in found],
                    "o-",
                    color=colour,
                    markersize=3,
                )
            axis.set(title=title, xlabel="square root of KL to the reference, nats")
        figure.savefig(
            arguments[0], metadata={"Date": None} if arguments[0].endswith("svg") else None
        )
        pyplot.close(figure)
    sys.stdout.write(table(HEADER, (row(name, found) for name, found in runs.items())) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
