"""Measure PPO steps as a run reports them: tokens per second, and the seconds of each part.

``python benchmarks/rollout.py --device cuda`` compares generation alone with other libraries.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

from rlhf.gpu_check.rows import CheckSetting, Finding, Task, measured_finding
from rlhf.gpu_check.runs import RUNS, run_to_end

PARTS = ("step", "generate", "score", "train")


def tasks(setting: CheckSetting) -> Iterator[Task]:
    """Yield a task for each run."""
    for number, (name, words) in enumerate(RUNS["speed"][setting.size].items(), start=1):
        run_dir = setting.folder / f"run_{number}"
        yield Task(name, partial(_time_ppo_step, run_dir, words))


def _time_ppo_step(run_dir: Path, words: str) -> Finding:
    ended = run_to_end(run_dir, words)
    _ = ended.result  # a run that failed raises here
    last = [line for line in ended.metrics if "time/step_seconds" in line][-1]
    seconds = {part: last[f"time/{part}_seconds"] for part in PARTS}
    speed = last["speed/tokens_per_second"]
    split = ", ".join(f"{part} {seconds[part]:.2f}" for part in PARTS[1:])
    return measured_finding(
        f"{speed:,.0f} tokens/s; {seconds['step']:.2f} s a step ({split})",
        tokens_per_second=speed,
        **{f"{part}_seconds": value for part, value in seconds.items()},
    )
