"""Compare sampling beside training with sampling in turn, after each of 30 steps of PPO.

    python -m tests.exact_ahead [--lags 1 2 4] [--steps 30] [--only "2 ranks"]     (make soak)

Both runs have the same rollout.lag. After each step the digest of every tensor of weights of actor
and critic must be the same (digests.jsonl), and at the end every file and metric, for each lag,
task, engine and number of ranks.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from itertools import product
from pathlib import Path

from rlhf.gpu_check.runs import differing_files
from rlhf.options.replay.keys import LOG as DIGESTS
from tests.runs import EPISODES, finished

TASKS = {
    "GAE": [],
    "RLOO, bf16": [
        *("ppo.advantage_estimator=rloo", "ppo.responses_per_prompt=2", "hardware.dtype=bf16")
    ],
    "environment": [*EPISODES],
}
ENGINES = {
    "torch, 1 rank": ["zero=stage0", "zero.engine=torch"],
    "ZeRO 2, 1 rank": ["zero=stage2", "zero.engine=deepspeed"],
    "ZeRO 3, 1 rank": ["zero=stage3", "zero.engine=deepspeed"],
    "ZeRO 2, 2 ranks": ["zero=stage2", "hardware.ranks_per_node=2"],
    "ZeRO 3, 2 ranks": ["zero=stage3", "hardware.ranks_per_node=2"],
}
# Gradients of few threads differ in rounding from those of many.
SHORT = ["hardware.cores_per_rank=1", "ppo.eval_prompts=4", "ppo.sample_every=10"]
SHORT += ["checkpoint.digest_every=1"]


def digests_of(run_dir: Path, *overrides: str) -> list[str]:
    """Run into ``run_dir``; return the lines of digests of PPO, one per step."""
    finished(run_dir, *overrides, *SHORT)
    lines = (run_dir / DIGESTS).read_text().splitlines()
    return [line for line in lines if json.loads(line)["phase"] == "ppo"]


def compare(folder: Path, overrides: Sequence[str], *, lag: int, steps: int) -> str:
    """Run in turn and beside training; return "equal", or the first step or file that differs."""
    folder.mkdir(parents=True)
    words = [*overrides, f"rollout.lag={lag}", f"ppo.steps={steps}"]
    in_turn = digests_of(folder / "in_turn", *words)
    beside = digests_of(folder / "beside", *words, "rollout.overlap=true", "rollout.samplers=2")
    if not len(in_turn) == len(beside) == len(set(in_turn)) == steps:
        return f"FAILED: {len(in_turn)} and {len(beside)} steps, {len(set(in_turn))} of them differ"
    for one, other in zip(in_turn, beside, strict=True):
        if one != other:
            return f"DIFFERENT after step {json.loads(one)['step']}"
    found = differing_files(folder / "in_turn", folder / "beside")
    return f"DIFFERENT: {', '.join(found)}" if found else "equal"


def main() -> int:
    """Compare all; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lags", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--only", default="", help="words in the names of an engine and a task")
    parser.add_argument("--folder", type=Path)
    options = parser.parse_args()
    root = options.folder or Path(tempfile.mkdtemp(prefix="exact-ahead-"))
    os.environ.update(DS_ACCELERATOR="cpu", RLHF_CACHE=str(root / "cache"))  # SFT runs once
    kinds = {
        f"{engine}, {task}": ENGINES[engine] + TASKS[task]
        for engine, task in product(ENGINES, TASKS)
    }
    chosen = [name for name in kinds if options.only in name]
    wrong, began = 0, time.monotonic()
    for number, (lag, name) in enumerate(product(options.lags, chosen)):
        started = time.monotonic()
        answer = compare(root / str(number), kinds[name], lag=lag, steps=options.steps)
        print(f"{name}, lag {lag}: {answer} ({time.monotonic() - started:.0f} s)", flush=True)
        wrong += answer != "equal"
    minutes = (time.monotonic() - began) / 60
    count = len(options.lags) * len(chosen)
    print(f"{count} pairs of runs of {options.steps} steps, {minutes:.1f} minutes: {wrong} unequal")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
