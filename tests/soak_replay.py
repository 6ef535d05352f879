"""Replay random steps of several kinds of runs: each must equal what the run has logged.

python -m tests.soak_replay [STEPS] [SEED]
"""

from __future__ import annotations

import random
import sys
import tempfile
from pathlib import Path

from tests.runs import EPISODES, ROOT, finished, metrics, python

KINDS = {
    "GAE, bf16": ["hardware.dtype=bf16", "ppo.ema_beta=0.9"],
    "GRPO": ["ppo.advantage_estimator=grpo", "ppo.responses_per_prompt=4"],
    "two ranks, ZeRO 3": ["zero=stage3", "hardware.ranks_per_node=2"],
    "episodes": EPISODES,
    "sampled ahead": ["rollout.lag=2", "rollout.overlap=true", "hardware.cores_per_rank=1"],
}
STEPS = ["ppo.steps=9", "checkpoint.every_steps=4", "checkpoint.keep=9"]
STEPS += ["checkpoint.keep_finished=true", "checkpoint.digest_every=1", "reuse.phases=never"]


def main(count: int = 30, seed: int = 1) -> None:
    """Make a run of each kind, replay ``count`` steps in all, and print a line for each."""
    chosen, failed = random.Random(seed), 0
    with tempfile.TemporaryDirectory() as folder:
        runs = {
            name: finished(Path(folder) / str(number), *STEPS, *words, PYTHONPATH=ROOT)
            for number, (name, words) in enumerate(KINDS.items())
        }
        for number in range(count):
            name = list(runs)[number % len(runs)]
            line = chosen.choice([x for x in metrics(runs[name]) if x["step"]])
            where = ("--phase", line["phase"], "--step", line["step"])
            found = python("-m", "rlhf.replay", runs[name], *where, PYTHONPATH=ROOT)
            failed += found.returncode != 0
            print(
                f"{number + 1:3} {name}: {(found.stdout + found.stderr).splitlines()[-1]}",
                flush=True,
            )
    sys.exit(f"{failed} of {count} replays differ" if failed else 0)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
