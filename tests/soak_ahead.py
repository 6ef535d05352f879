"""Kill a run that samples beside training, resume it by the same command, and compare.

    python -m tests.soak_ahead [--kills 60] [--seed 1] [--folder FOLDER]     (make soak)

A third of the kills each hit a sampling process (or its supervisor), a training rank and the
launcher, at any moment from the start of the process. Each kill must end the whole run, without a
process, shared memory or temporary file left; the next command resumes the run. What the last
attempt finishes must equal a run that nobody killed: every weight, metric, sample and result.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from rlhf.gpu_check.runs import differing_files
from tests.runs import ROOT, TINY_RUN, start
from tests.soak import EVERY_STEP, MARK, leavings, marked, progress, run

AHEAD = [
    *("rollout.lag=2", "rollout.overlap=true", "rollout.samplers=2", "zero=stage2"),
    *("hardware.ranks_per_node=2", "hardware.cores_per_rank=1", "phase.order=[sft,ppo]"),
    *("model@reward_model=gold", "ppo.eval_every=4", "ppo.eval_prompts=4"),
]
# What the command line of a victim has; the launcher is the process that was started.
VICTIMS = {"sampler": b"overlapped_sampling", "rank": b"rlhf.runtime.rank", "launcher": b""}
LONGEST_START = 15.0  # seconds from the command to the first step of PPO
LONGEST_STEP = 0.5  # seconds
SECONDS_TO_END = 20.0  # for all that a killed run has started


def shared_memory(mark: str) -> set[Path]:
    """Return the files of shared memory that the processes of a run have mapped."""
    found = set()
    for pid in marked(mark):
        with suppress(OSError):  # it has ended meanwhile
            words = Path(f"/proc/{pid}/maps").read_text().split()
            found |= {Path(word) for word in words if word.startswith("/dev/shm/")}
    return found


def find_victim(kind: str, launcher: int, mark: str, draw: random.Random) -> int | None:
    """Return the id of a process of the run to kill; None if there is none yet."""
    if kind == "launcher":
        return launcher
    found = [pid for pid in sorted(marked(mark)) if VICTIMS[kind] in command_of(pid)]
    return draw.choice(found) if found else None


def command_of(pid: int) -> bytes:
    """Return the command line of a process; empty if it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def wait_for(happened: Callable[[], object], seconds: float) -> bool:
    """Wait until something has happened; return False if it does not happen in time."""
    patience = time.monotonic() + seconds
    while not happened():
        if time.monotonic() > patience:
            return False
        time.sleep(0.005)
    return True


def kill_once(
    folder: Path, words: list[str], kind: str, advance: int, draw: random.Random, temporary: Path
) -> str:
    """Start the run, kill a process of ``kind`` after ``advance`` lines; return what was left.

    Without an ``advance`` the moment is any from the start of the command.

    Raises:
        RuntimeError: if the run ended before the kill, or did not end after it.
    """
    before, mark = progress(folder), f"kill-{time.monotonic_ns()}"
    kept = set(temporary.iterdir())  # what torch and triton keep there for later runs
    process = start(
        ROOT / "launch.py",
        *words,
        cwd=folder.parent,
        popen=subprocess.Popen,
        **{MARK: mark, "TMPDIR": temporary},
    )
    if advance:
        wait_for(lambda: progress(folder) >= before + advance or process.poll() is not None, 300)
    time.sleep(draw.uniform(0, LONGEST_STEP if advance else LONGEST_START))
    wait_for(lambda: find_victim(kind, process.pid, mark, draw) or process.poll() is not None, 300)
    victim = find_victim(kind, process.pid, mark, draw)
    if victim is None or process.poll() is not None:
        raise RuntimeError(f"it ended before the kill: {process.communicate()[1]}")
    shared = shared_memory(mark)
    os.kill(victim, signal.SIGKILL)
    try:
        _, said = process.communicate(timeout=120)
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"it goes on without its {kind}: {sorted(marked(mark))}") from None
    if "Traceback" in said:
        raise RuntimeError(said)
    wait_for(lambda: not any(marked(mark)), SECONDS_TO_END)
    left = [f"process {pid} {command_of(pid)!r}" for pid in marked(mark)]
    files = set(temporary.iterdir()) - kept | {path for path in shared if path.exists()}
    return ", ".join([*left, *map(str, files)])


def soak(folder: Path, *, kills: int, seed: int) -> list[str]:
    """Kill the run ``kills`` times; return what differs at its end, and what was left behind."""
    temporary = folder / "temporary"
    temporary.mkdir(parents=True)
    words = [*TINY_RUN, *AHEAD, f"ppo.steps={4 * kills}"]
    whole, killed = folder / "whole", folder / "killed"
    run(*words, f"run_dir={whole}", cwd=folder, popen=subprocess.Popen, TMPDIR=temporary)
    words += [*EVERY_STEP, f"run_dir={killed}"]
    draw, lines, found = random.Random(seed), progress(whole), []
    kinds = [list(VICTIMS)[number % len(VICTIMS)] for number in range(kills)]
    draw.shuffle(kinds)
    for number, kind in enumerate(kinds, 1):
        most = (lines - progress(killed)) // (kills - number + 1)
        advance = draw.randint(0, max(1, most))
        left = kill_once(killed, words, kind, advance, draw, temporary)
        at = f"after {progress(killed)} of {lines} lines"
        print(f"kill {number}, {kind}, {at}: left {left or 'nothing'}", flush=True)
        found += [left] if left else []
    run(*words, cwd=folder, popen=subprocess.Popen, TMPDIR=temporary)
    print(", ".join(f"{count} x {kind}" for kind, count in sorted(Counter(kinds).items())))
    return found + differing_files(whole, killed) + leavings(killed, killed.name)


def main() -> int:
    """Run the soak; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=60)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--folder", type=Path)
    options = parser.parse_args()
    root, began = options.folder or Path(tempfile.mkdtemp(prefix="soak-ahead-")), time.monotonic()
    os.environ.update(DS_ACCELERATOR="cpu", RLHF_CACHE=str(root / "cache"))
    found = soak(root, kills=options.kills, seed=options.seed)
    minutes = (time.monotonic() - began) / 60
    verdict = f"DIFFERENT: {', '.join(found)}" if found else "equal, nothing left behind"
    print(f"{options.kills} kills, {minutes:.1f} minutes: {verdict}")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
