"""Kill a run at random moments and resume it by the same command; compare it with an unkilled run.

    python -m tests.soak [--kills 100] [--seed 1] [--folder FOLDER]     (make soak)

Half of the kills come at any time after the start, half while a checkpoint is being written.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tests.runs import ROOT, TINY_RUN, launch, metrics, start

STEPS = ["sft.epochs=9", "reward.epochs=9", "ppo.steps=40", "ppo.eval_every=4"]
EVERY_STEP = ["checkpoint.every_steps=1", "resume=auto"]
TIMES = ("seconds", "peak_memory_gib", "planned", "measured")
LONGEST_STEP = 0.2  # seconds
COMPARED = (".safetensors", "samples.jsonl", "alarms.jsonl", "held_out.json")


def differences(one: Path, other: Path) -> list[str]:
    """What differs between two runs besides times: metrics, results, and files of any kind."""
    found = [name for name in sorted(files(one) ^ files(other))]
    if metrics(one) != metrics(other):
        found.append("metrics.jsonl")
    if untimed(one) != untimed(other):
        found.append("result.json")
    return found + [
        name
        for name in sorted(files(one) & files(other))
        if name.endswith(COMPARED) and (one / name).read_bytes() != (other / name).read_bytes()
    ]


def untimed(run_dir: Path) -> dict[str, Any]:
    """The results of the phases, without times and memory."""
    result = json.loads((run_dir / "result.json").read_text())
    return {
        phase: {k: v for k, v in values.items() if k not in TIMES}
        for phase, values in result["phases"].items()
    }


def files(run_dir: Path) -> set[str]:
    """The files of a run."""
    return {str(path.relative_to(run_dir)) for path in run_dir.rglob("*") if path.is_file()}


def soak(
    run_dir: Path,
    overrides: Sequence[str],
    *,
    kills: int,
    lines: int,
    seed: int,
    say: Callable[[str], None],
) -> int:
    """Kill the run ``kills`` times, then let it finish; return how many kills hit a save.

    ``lines`` is the number of lines of metrics that the whole run writes.
    """
    draw, in_saves = random.Random(seed), 0
    words = [ROOT / "launch.py", *TINY_RUN, *overrides, *EVERY_STEP, f"run_dir={run_dir}"]
    for number in range(1, kills + 1):
        aims_at_save = draw.random() < 0.5
        before, began = progress(run_dir), time.monotonic()
        # Steps of this attempt: few enough that the run outlasts the kills on any machine.
        advance = draw.randint(1, max(1, (lines - before) // (kills - number + 1)))
        process = start(*words, cwd=run_dir.parent)
        while process.poll() is None:
            is_saving = bool(list(run_dir.glob("*/state/.step-*")))
            is_time = progress(run_dir) >= before + advance
            if (is_time and (is_saving or not aims_at_save)) or time.monotonic() - began > 60:
                break
            time.sleep(0.002)
        if not aims_at_save:
            time.sleep(draw.uniform(0, LONGEST_STEP))  # anywhere in a step
        if process.poll() is not None:
            raise RuntimeError(f"the run finished after {number - 1} kills: take more steps")
        is_saving = bool(list(run_dir.glob("*/state/.step-*")))
        process.send_signal(signal.SIGKILL)
        process.communicate()
        in_saves += is_saving
        say(f"kill {number}: after {progress(run_dir)} lines{', in a save' if is_saving else ''}")
    run = launch(*map(str, words[1:]), cwd=run_dir.parent, timeout=900)
    if run.returncode:
        raise RuntimeError(run.stderr)
    return in_saves


def progress(run_dir: Path) -> int:
    """The number of lines of metrics so far."""
    path = run_dir / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def main() -> int:
    """Run the soak; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--folder", type=Path)
    options = parser.parse_args()
    os.environ.update(DS_ACCELERATOR="cpu")
    folder = options.folder or Path(tempfile.mkdtemp(prefix="soak-"))
    folder.mkdir(parents=True, exist_ok=True)
    whole, killed = folder / "whole", folder / "killed"
    began = time.monotonic()
    subprocess.run(
        [sys.executable, ROOT / "launch.py", *TINY_RUN, *STEPS, f"run_dir={whole}"],
        check=True,
        stdout=subprocess.DEVNULL,
    )
    of_run = {"kills": options.kills, "lines": progress(whole), "seed": options.seed}
    in_saves = soak(killed, STEPS, **of_run, say=print)
    found = differences(whole, killed)
    minutes = (time.monotonic() - began) / 60
    print(f"{options.kills} kills, {in_saves} in a save, {minutes:.1f} minutes")
    print("no difference" if not found else f"DIFFERENT: {', '.join(found)}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
