"""What responses of older weights cost PPO, and what corrections repair.

    python benchmarks/staleness.py OUT [--seeds 5] [--lags 0 1 2 4 8]

Runs the default task's PPO below OUT with each lag and correction, one run per core, unless a run
has a report already; all runs of a seed share its SFT and reward model. Prints held-out means over
the seeds, and the differences from lag 0, which are paired by seed.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from common import run_on_cores, table

from rlhf.base.intervals import Estimate, mean_with_interval
from rlhf.run.results import read_phase_result

WEIGHTS = "ppo.rollout_correction"
CORRECTIONS: Mapping[str, Sequence[str]] = {
    "none": (),
    "token, truncated at 2": (f"{WEIGHTS}=token", f"{WEIGHTS}_cap=2"),
    "sequence, masked above 2": (
        f"{WEIGHTS}=sequence",
        f"{WEIGHTS}_mode=mask",
        f"{WEIGHTS}_cap=2",
    ),
    "decoupled, token, masked above 5": (
        f"{WEIGHTS}=token",
        f"{WEIGHTS}_mode=mask",
        f"{WEIGHTS}_cap=5",
    ),
}
MEASURES = {"gold": "gold_after", "exactly right": "exact_after", "KL, nats": "kl_after"}
Cell = tuple[int, str]  # lag and correction


def cells(lags: Sequence[int]) -> list[Cell]:
    """Return the lags with their corrections; without a lag there is nothing to correct."""
    return [(lag, name) for lag in lags for name in (CORRECTIONS if lag else ("none",))]


def run_dir_of(out: Path, cell: Cell, seed: int) -> Path:
    """Return the run directory of a cell and a seed."""
    lag, name = cell
    words = name.replace(",", "").replace(" ", "_")
    return out / f"lag_{lag}_{words}" / str(seed)


def measured(out: Path, cell: Cell, seeds: Sequence[int]) -> dict[str, dict[int, float]]:
    """Return, for each measure, the result of each seed that has finished."""
    found: dict[str, dict[int, float]] = {title: {} for title in MEASURES}
    for seed in seeds:
        result = read_phase_result(run_dir_of(out, cell, seed), "ppo")
        for title, name in MEASURES.items() if result else ():
            found[title][seed] = float((result or {})[name])
    return found


def text_of(estimate: Estimate, *, is_difference: bool) -> str:
    """Return a mean and its interval; a difference whose interval excludes 0 is bold."""
    sign = "+" if is_difference else ""
    text = f"{estimate.mean:{sign}.3f} ± {estimate.half:.3f}"
    return f"**{text}**" if is_difference and estimate.excludes_zero else text


def rows(found: Mapping[Cell, dict[str, dict[int, float]]]) -> list[list[str | float | None]]:
    """Return a row for each cell: seeds, means, and paired differences from the first cell."""
    reference = next(iter(found.values()))
    lines: list[list[str | float | None]] = []
    for (lag, name), measures in found.items():
        seeds = next(iter(measures.values()))
        line: list[str | float | None] = [str(lag), name, str(len(seeds))]
        for title, values in measures.items():
            line.append(text_of(mean_with_interval(list(values.values())), is_difference=False))
            pairs = [values[s] - reference[title][s] for s in values if s in reference[title]]
            is_compared = measures is not reference and pairs
            difference = mean_with_interval(pairs) if is_compared else None
            line.append(text_of(difference, is_difference=True) if difference else None)
        lines.append(line)
    return lines


def main() -> None:
    """Run the cells, seed by seed, and print the table."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("out", type=Path)
    options.add_argument("--seeds", type=int, default=5)
    options.add_argument("--lags", type=int, nargs="+", default=[0, 1, 2, 4, 8])
    options.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    given = options.parse_args()
    out, seeds = given.out.resolve(), range(1, given.seeds + 1)
    for seed in seeds:  # one seed after the other: what has finished can be compared
        runs = {
            run_dir_of(out, (lag, name), seed): [
                "reuse.phases=always",
                f"rollout.lag={lag}",
                *CORRECTIONS[name],
                f"seed={seed}",
            ]
            for lag, name in cells(given.lags)
        }
        run_on_cores(dict(list(runs.items())[:1]), at_a_time=1)  # trains what the others reuse
        run_on_cores(runs, at_a_time=given.jobs)
    found = {cell: measured(out, cell, seeds) for cell in cells(given.lags)}
    found = {cell: each for cell, each in found.items() if each["gold"]}
    header = ["lag", "correction", "seeds"]
    header += [text for title in MEASURES for text in (title, "to lag 0")]
    sys.stdout.write(table(header, rows(found)) + "\n")
    figures = {f"{lag}, {name}": each for (lag, name), each in found.items()}
    (out / "staleness.json").write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
