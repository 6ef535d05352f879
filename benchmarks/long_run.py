"""Resident memory over the steps of a run, and the time that checkpoints and watchdog take.

    python benchmarks/long_run.py [--overrides WORD ...] [--json FIGURES.json]

Runs ``launch.py`` with a tracker that notes memory and times from inside. Default: 5,000 PPO steps
of experiment=smoke with a checkpoint every minute; ``--overrides`` alone is the default run.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from common import BENCHMARKS, ROOT, finish, parser, table

from rlhf.run.tracker import Tracker

LONG = ["experiment=smoke", "ppo.steps=5000", "checkpoint.every_minutes=1", "plan=off"]
LONG += ["rollout.max_response_tokens=8", "ppo.sample_every=1000", "ppo.eval_prompts=4"]
FIGURES = "LONG_RUN_FIGURES"  # the variable that names the tracker's file
NORMS = "gradient norms, which find NaN and clip"
MIB = 1 << 20
WARM = 500  # steps in which caches and the heap may still grow


class Meter(Tracker):
    """A tracker that notes the resident memory after each PPO step, and the seconds of parts."""

    def __init__(self, *_: object) -> None:
        from rlhf.base.heartbeat import Heartbeat
        from rlhf.engine.split_adamw import SplitAdamW
        from rlhf.engine.torch_engine import WholeAdamW
        from rlhf.phases.shared.checkpoints import Checkpoints

        self._seconds: Counter[str] = Counter()
        self._calls: Counter[str] = Counter()
        self._memory_mib: list[float] = []
        self._started = time.perf_counter()
        for part, owner, method in (
            ("checkpoints", Checkpoints, "_save_checkpoint"),
            ("signals and due checkpoints, with checkpoints", Checkpoints, "_finish_step"),
            ("watchdog: signs of life", Heartbeat, "start"),
            (NORMS, SplitAdamW, "grad_norm"),
            (NORMS, WholeAdamW, "grad_norm"),
        ):
            setattr(owner, method, self._timed(part, getattr(owner, method)))

    def _timed(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def timed(*args: Any) -> Any:
            began = time.perf_counter()
            found = function(*args)
            self._seconds[part] += time.perf_counter() - began
            self._calls[part] += 1
            return found

        return timed

    def log(self, phase: str, step: int, values: Mapping[str, float]) -> None:  # noqa: ARG002
        """Note the resident memory after a PPO step."""
        if "ppo/kl_ctl" in values:
            pages = int(Path("/proc/self/statm").read_text().split()[1])
            self._memory_mib.append(round(pages * os.sysconf("SC_PAGE_SIZE") / MIB, 1))

    def finish(self) -> None:
        """Write what was noted, with the CPU time of the watchdog's thread."""
        (watchdog,) = (each for each in threading.enumerate() if each.name == "watchdog")
        fields = Path(f"/proc/self/task/{watchdog.native_id}/stat").read_text().rpartition(")")[2]
        ticks = sum(map(int, fields.split()[11:13]))  # user and system time
        self._seconds["watchdog: its thread"] = ticks / os.sysconf("SC_CLK_TCK")
        found = {
            "run_seconds": time.perf_counter() - self._started,
            "seconds": self._seconds,
            "calls": self._calls,
            "memory_mib": self._memory_mib,
        }
        Path(os.environ[FIGURES]).write_text(json.dumps(found))


def measure(overrides: list[str]) -> dict[str, Any]:
    """Run ``launch.py``; return what the tracker noted."""
    with tempfile.TemporaryDirectory() as folder:
        figures = Path(folder) / "figures.json"
        words = [f"run_dir={folder}/run", "tracking.others=[long_run:Meter]"]
        path = os.pathsep.join([str(BENCHMARKS), os.environ.get("PYTHONPATH", "")])
        subprocess.run(
            [sys.executable, ROOT / "launch.py", *overrides, *words],
            cwd=folder,
            env=os.environ | {FIGURES: str(figures), "PYTHONPATH": path},
            stdout=sys.stderr,
            check=True,
        )
        found: dict[str, Any] = json.loads(figures.read_text())
        return found


def growth(memory_mib: list[float]) -> float:
    """Return MiB per 1,000 steps: the slope of the least-squares line after the warm steps."""
    import numpy as np

    steps = range(min(WARM, len(memory_mib) // 2), len(memory_mib))
    return float(1000 * np.polyfit(steps, [memory_mib[step] for step in steps], 1)[0])


def main() -> None:
    """Run, and print the tables."""
    choices = parser(__doc__, shape="tiny")
    choices.add_argument("--overrides", nargs="*", default=LONG)
    options = choices.parse_args()
    found = measure(options.overrides)
    memory = found["memory_mib"]
    rows = [
        [part, found["calls"].get(part), seconds, 100 * seconds / found["run_seconds"]]
        for part, seconds in found["seconds"].items()
    ]
    at = sorted({0, min(WARM, len(memory) - 1), len(memory) // 2, len(memory) - 1})
    resident = table(("PPO step", "resident MiB"), [[f"{i + 1:,}", memory[i]] for i in at])
    shares = table(("part", "calls", "seconds", f"% of {found['run_seconds']:.0f} s"), rows)
    found["mib_per_1000_steps"] = growth(memory)
    grown = f"{found['mib_per_1000_steps']:.2f} MiB per 1,000 steps"
    finish(options, f"{resident}\n\n{grown}\n\n{shares}", found)


if __name__ == "__main__":
    main()
