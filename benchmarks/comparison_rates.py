"""How often a comparison of settings is right: pairs that differ in nothing, and in the KL penalty.

    python benchmarks/comparison_rates.py OUT [--pairs 20] [--seeds 3]

Reads the runs that ``alarm_rates.py`` left below OUT. An A/A pair is two groups of runs of the
default recipe with different seeds, drawn at random; each time that a difference is told, it is
wrong. An A/B pair is runs with ``ppo.kl_ctl=0.02`` and ``0.5`` that have the same seeds; each time
that none is told, one is missed.
"""

from __future__ import annotations

import argparse
import random
import sys
from pathlib import Path

from common import table

from rlhf.report.comparison import ComparedRun, Setting, read_compared_run
from rlhf.report.differences import estimate_difference

TITLES = ("objective", "exactly right", "score", "KL, nats")


def runs_of(folder: Path) -> list[ComparedRun]:
    """Return the runs of a scenario, by their seeds."""
    return sorted((read_compared_run(path) for path in folder.iterdir()), key=lambda run: run.seeds)


def told(first: list[ComparedRun], other: list[ComparedRun], title: str) -> bool:
    """Return True if a difference is told."""
    found = estimate_difference(Setting({}, first), Setting({}, other), title)
    return found.verdict in {"higher", "lower"}


def main() -> None:
    """Draw the pairs and print how many differ."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("out", type=Path)
    options.add_argument("--pairs", type=int, default=20)
    options.add_argument("--seeds", type=int, default=3, help="runs of each setting")
    given = options.parse_args()
    draws, size = random.Random(1), given.seeds
    default, weak, strong = (
        runs_of(given.out / name) for name in ("default", "weak_penalty", "strong_penalty")
    )
    same = dict.fromkeys(TITLES, 0)
    other = dict.fromkeys(TITLES, 0)
    for _ in range(given.pairs):
        chosen = draws.sample(default, 2 * size)
        places = draws.sample(range(len(weak)), size)
        for title in TITLES:
            same[title] += told(chosen[:size], chosen[size:], title)
            pair = [[runs[place] for place in places] for runs in (weak, strong)]
            other[title] += told(*pair, title)
    header = ["measure", "A/A pairs called different", "kl_ctl 0.02 and 0.5 called different"]
    rows = [
        [title, f"{same[title]} of {given.pairs}", f"{other[title]} of {given.pairs}"]
        for title in TITLES
    ]
    sys.stdout.write(table(header, rows) + "\n")


if __name__ == "__main__":
    main()
