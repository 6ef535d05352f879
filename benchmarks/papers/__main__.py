"""Measure results of papers again, and say of each whether its criterion holds.

    make papers [QUICK=1] [ONLY="kl_gradients best_of_n"]

Each result is a module of this folder. Each of its seeds is measured in a process of its own on one
core, below ../runs/papers; a seed that has been measured is not measured again. The figures go to
results/papers/NAME.json and the page to papers.md. QUICK=1 takes one seed and less of
everything, to see the code at work; it writes neither.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from common import BENCHMARKS, ROOT, machine, on_own_cores

from papers.claims import Figures, NotMeasurableError, PaperResult, Place
from papers.page import write_page

RESULTS = BENCHMARKS / "results" / "papers"


@dataclass(frozen=True, kw_only=True)
class Seed:
    """One seed of one result, and where it is measured."""

    name: str
    number: int
    out: Path
    is_quick: bool

    @property
    def place(self) -> Place:
        """Return the folders of the measurement."""
        folder = self.out / self.name / str(self.number)
        return Place(folder, self.out / "shared", is_quick=self.is_quick)

    @property
    def file(self) -> Path:
        """Return the file with its figures."""
        return self.place.folder / "figures.json"


def all_results() -> dict[str, PaperResult]:
    """Return the results of this folder by the names of their modules, cheapest first."""
    names = sorted(path.stem for path in Path(__file__).parent.glob("[a-z]*.py"))
    modules = {name: importlib.import_module(f"papers.{name}") for name in names}
    found = {name: module.RESULT for name, module in modules.items() if hasattr(module, "RESULT")}
    return dict(sorted(found.items(), key=lambda each: each[1].minutes * len(each[1].seeds)))


def measure(seed: Seed) -> None:
    """Measure one seed in this process and write its figures, with their commit and machine."""
    os.environ |= {"RLHF_CACHE": str(seed.place.shared / "cache"), "HF_HUB_OFFLINE": "1"}
    seed.place.folder.mkdir(parents=True, exist_ok=True)
    start = time.process_time(), time.monotonic()
    result: PaperResult = importlib.import_module(f"papers.{seed.name}").RESULT
    figures = result.measure(seed.number, seed.place)
    seconds = time.monotonic() - start[1]
    document = {"figures": figures, "seconds": seconds, "machine": machine("cpu")}
    partial = seed.file.with_suffix(".partial")
    partial.write_text(json.dumps(document, indent=1) + "\n")
    partial.replace(seed.file)


def measure_on_cores(seeds: Sequence[Seed], *, jobs: int) -> None:
    """Measure the seeds that have no figures yet, each in a process of its own on one core."""

    def start(seed: Seed, on_core: list[str]) -> None:
        words = [seed.name, str(seed.number), str(seed.out), *(["quick"] if seed.is_quick else [])]
        done = subprocess.run(
            [*on_core, sys.executable, "-m", "papers", "--seed", *words],
            cwd=BENCHMARKS,
            check=False,
            stderr=subprocess.PIPE,
        )
        last = done.stderr.decode(errors="replace").strip()[-800:] if done.returncode else "done"
        sys.stderr.write(f"{seed.name}, seed {seed.number}: {last}\n")

    on_own_cores([seed for seed in seeds if not seed.file.exists()], start, at_a_time=jobs)


def told(name: str, result: PaperResult, seeds: Sequence[Seed]) -> dict[str, object] | None:
    """Return what has been measured of a result, with the verdict; None if nothing has."""
    finished = [seed for seed in seeds if seed.file.exists()]
    measured = {seed.number: json.loads(seed.file.read_text()) for seed in finished}
    if not measured:
        return None
    figures: Mapping[int, Figures] = {seed: each["figures"] for seed, each in measured.items()}
    verdict = result.judge(figures)
    return {
        "result": name,
        "outcome": verdict.outcome,
        "found": verdict.found,
        "seeds": {str(seed): each for seed, each in measured.items()},
    }


def main() -> None:
    """Measure what is asked for, print the verdicts, and write figures and page."""
    options = argparse.ArgumentParser(
        prog="make papers",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    results = all_results()
    options.add_argument("--only", nargs="*", choices=[*results], default=[], metavar="RESULT")
    options.add_argument("--quick", action="store_true")
    options.add_argument("--out", type=Path, default=ROOT / "runs" / "papers")
    options.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    given = options.parse_args()
    out = (given.out / "quick" if given.quick else given.out).resolve()
    chosen = {name: result for name, result in results.items() if name in (given.only or results)}
    seeds = {
        name: [
            Seed(name=name, number=number, out=out, is_quick=given.quick)
            for number in (result.seeds[:1] if given.quick else result.seeds)
        ]
        for name, result in chosen.items()
    }
    measure_on_cores([seed for each in seeds.values() for seed in each], jobs=given.jobs)
    is_missing = False
    for name, result in chosen.items():
        found = told(name, result, seeds[name])
        is_missing |= found is None
        text = f"{found['outcome']}: {found['found']}" if found else "not measured"
        sys.stdout.write(f"{name}: {text}\n")
        if found and not given.quick:
            RESULTS.mkdir(parents=True, exist_ok=True)
            (RESULTS / f"{name}.json").write_text(json.dumps(found, indent=1) + "\n")
    if not given.quick:
        write_page(results, RESULTS, BENCHMARKS / "papers.md")
    sys.exit(is_missing)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--seed"]:
        name, number, out, *rest = sys.argv[2:]
        try:
            measure(Seed(name=name, number=int(number), out=Path(out), is_quick=rest == ["quick"]))
        except (NotMeasurableError, subprocess.CalledProcessError) as missing:
            sys.exit(str(missing))  # after what the run or script itself said
    else:
        main()
