"""Score and gold score over the square root of KL: what a reward model that is pushed too far does.

    python benchmarks/overoptimisation.py docs/images/overoptimised.svg RUN_DIR [RUN_DIR ...]

Reads the evaluations of runs with ``ppo.eval_every`` (``experiment=overoptimised``), draws both
scores over the distance that https://arxiv.org/abs/2210.10760 measures in, and prints them as a
table. Needs the extra ``benchmarks`` (matplotlib).
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from pathlib import Path

from common import table
from evaluated import Evaluated, evaluations
from plots import OTHER, OWN, STYLE

PANELS = {"score": ("score of the reward model", OTHER), "gold": ("gold score", OWN)}
HEADER = [
    "run",
    "KL at most gold",
    *(f"{name} {when}" for name in PANELS for when in ("first", "at most gold", "last")),
]


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
