"""Kill runs of many kinds at random moments, continue them by the same command, and compare.

    python -m tests.soak [--kills 105] [--seed 1] [--folder FOLDER]     (make soak)

Each kind is killed equally often: the launcher alone, a rank or sampler (which must end the
run), or all at once, at any time after the start or while a checkpoint is being written. What the
last attempt finishes must equal a run that nobody killed, bit for bit, and leave no checkpoint,
half-written file, held lock or process.
"""

import argparse
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from glob import glob
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from rlhf.gpu_check.runs import differing_files
from tests.rewards.endpoint import endpoint
from tests.runs import EPISODES, ROOT, TINY_RUN, launch, start

STEPS = ["sft.epochs=9", "reward.epochs=9", "ppo.steps=40", "ppo.eval_every=4"]
FEW_STEPS = ["sft.epochs=3", "reward.epochs=3", "ppo.steps=12", "ppo.eval_every=4"]
EVERY_STEP = ["checkpoint.every_steps=1", "resume=auto"]
LONGEST_STEP = 0.2  # seconds
MARK = "RLHF_SOAK"  # in the environment of all processes of one attempt

# Runs, which resume=auto continues, and sweeps, which the same command continues.
RUNS: Mapping[str, Sequence[str]] = {
    "plain": [],
    "dropout": ["model.dropout=0.1", "ppo.actor_dropout=0.1", "ppo.critic_dropout=0.1"],
    "endpoint": ["phase=pipeline_rule", "rewards.length={kind: http, url: '{url}'}"],
    "episodes": EPISODES,
    "two ranks under ZeRO 0": ["hardware.ranks_per_node=2", "zero=stage0"],
    "two ranks under ZeRO 2": ["hardware.ranks_per_node=2", "zero=stage2"],
    "sampled beside training": [
        *("rollout.lag=2", "rollout.overlap=true", "rollout.samplers=2", "zero=stage2"),
        *("hardware.ranks_per_node=2", "hardware.cores_per_rank=1"),
    ],
}
SWEEPS: Mapping[str, Sequence[str]] = {
    "joblib": ["hydra/launcher=joblib", "seed=1,2,3,4"],
    "study": ["sweep=search_gold_kl", "study.trials=4", f"study.slots={os.cpu_count()}"],
}
JOBS = 4
OF_RANKS = (b"rlhf.runtime.rank", b"overlapped_sampling")  # in the commands of ranks and samplers
OF_SWEEPS = ("plan.json", "command.txt", "output.log", "job.lock")  # not of a resumed run


def soak(
    folder: Path,
    words: Sequence[str],
    *,
    kills: int,
    lines: int,
    seed: int,
    say: Callable[[str], None],
    **how: Any,
) -> int:
    """Kill the command ``kills`` times, then let it finish; return how many kills hit a save.

    It writes below ``folder``; ``lines`` is the number of lines of metrics that it writes in all.
    ``start`` says how it is started.
    """
    draw, in_saves = random.Random(seed), 0
    for number in range(1, kills + 1):
        aims_at_save, victim = draw.random() < 0.5, draw.choice(["launcher", "one", "all"])
        before, began = progress(folder), time.monotonic()
        # Steps of this attempt: few enough that the run outlasts the kills on any machine.
        advance = draw.randint(1, max(1, (lines - before) // (kills - number + 1)))
        mark = f"{folder.name}-{number}"
        process = start(ROOT / "launch.py", *words, cwd=folder.parent, **how, **{MARK: mark})
        while process.poll() is None:
            is_time = progress(folder) >= before + advance
            if (is_time and (saves(folder) or not aims_at_save)) or time.monotonic() - began > 90:
                break
            time.sleep(0.002)
        if not aims_at_save:
            time.sleep(draw.uniform(0, LONGEST_STEP))  # anywhere in a step
        if process.poll() is not None:
            raise RuntimeError(f"it ended before kill {number}: {process.communicate()[1]}")
        in_saves += (is_saving := saves(folder))
        others = sorted(marked(mark))
        of_run = [pid for pid in others if any(name in command_of(pid) for name in OF_RANKS)]
        one = [draw.choice(of_run or [process.pid])]
        for pid in {"launcher": [process.pid], "one": one, "all": others}[victim]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.communicate(timeout=300)  # it ends without the process that was killed
        where = "in a save" if is_saving else "between saves"
        say(f"kill {number}: after {progress(folder)} of {lines} lines, {where}")
    run(*words, cwd=folder.parent, **how, **{MARK: folder.name})
    return in_saves


def run(*words: str, **how: Any) -> None:
    """Let a command run to its end, which must be a good one."""
    process = launch(*words, timeout=900, **how)
    if process.returncode:
        raise RuntimeError(process.stderr)


def saves(folder: Path) -> bool:
    """Return True while a checkpoint below ``folder`` is being written."""
    return bool(below(folder, "state/.step-*"))


def progress(folder: Path) -> int:
    """The number of lines of metrics below ``folder`` so far."""
    return sum(path.read_bytes().count(b"\n") for path in below(folder, "metrics.jsonl"))


def below(folder: Path, pattern: str) -> list[Path]:
    """The paths of a pattern anywhere below ``folder``, where a run makes and removes folders."""
    return [folder / name for name in glob(f"**/{pattern}", root_dir=folder, recursive=True)]


def marked(mark: str) -> Iterator[int]:
    """Yield the processes that have ``mark`` in their environment, and are not this one."""
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            words = (folder / "environ").read_bytes().split(b"\0")
            if any(word.startswith(f"{MARK}={mark}".encode()) for word in words):
                yield int(folder.name)


def command_of(pid: int) -> bytes:
    """Return the command line of a process; empty if it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def leavings(folder: Path, mark: str) -> list[str]:
    """What should be gone after the last attempt: states, half-written files, locks, processes."""
    names = [p for p in folder.rglob("*") if p.name == "state" or p.name.endswith(".building")]
    for path in folder.rglob("*.lock"):
        try:
            with FileLock(path, timeout=0):
                pass
        except Timeout:
            names.append(path)
    time.sleep(2)  # a process that ends with its parent needs a moment
    return [str(path) for path in names] + [f"process {number}" for number in marked(mark)]


def soak_run(folder: Path, overrides: Sequence[str], **how: Any) -> tuple[int, list[str]]:
    """Soak one run; return how many kills hit a save, and what differs or was left behind."""
    whole, killed = folder / "whole", folder / "killed"
    words = [*TINY_RUN, *STEPS, *overrides]
    run(*words, f"run_dir={whole}", cwd=folder, popen=how["popen"])
    words += [*EVERY_STEP, f"run_dir={killed}"]
    in_saves = soak(killed, words, lines=progress(whole), **how)
    return in_saves, differing_files(whole, killed) + leavings(killed, killed.name)


def soak_sweep(folder: Path, overrides: Sequence[str], **how: Any) -> tuple[int, list[str]]:
    """Soak a sweep; each of its jobs must equal a run of its own with the same configuration."""
    sweep, common = folder / "runs", [*TINY_RUN, *FEW_STEPS, "reuse.phases=never"]
    run(*common, f"run_dir={folder / 'one'}", cwd=folder, popen=how["popen"])
    words = ["-m", *common, *overrides, "checkpoint.every_steps=1"]
    in_saves = soak(sweep, words, lines=JOBS * progress(folder / "one"), **how)
    found = leavings(sweep, sweep.name)
    jobs = [config.parent for config in sorted(sweep.rglob("config.yaml"))]
    if len(jobs) != JOBS:
        found.append(f"{len(jobs)} jobs")
    for job in jobs:
        alone = folder / "alone" / job.name
        alone.mkdir(parents=True)
        shutil.copy(job / "config.yaml", alone)
        with one_core():
            run(f"resume={alone}", cwd=folder, popen=how["popen"])
        found += [
            f"{job.name}: {name}" for name in differing_files(job, alone) if name not in OF_SWEEPS
        ]
    return in_saves, found


@contextmanager
def one_core() -> Iterator[None]:
    """Start processes on one core, as a sweep with as many jobs as cores does."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)


def main() -> int:
    """Run the soak; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=105)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--kind", choices=[*RUNS, *SWEEPS], action="append")
    options = parser.parse_args()
    os.environ.update(DS_ACCELERATOR="cpu")
    root = options.folder or Path(tempfile.mkdtemp(prefix="soak-"))
    kinds, failed, say = options.kind or [*RUNS, *SWEEPS], False, partial(print, flush=True)
    with endpoint() as server:
        for kind in kinds:
            folder, began = root / kind.replace(" ", "_"), time.monotonic()
            folder.mkdir(parents=True)
            os.environ["RLHF_CACHE"] = str(folder / "cache")
            how = {"kills": options.kills // len(kinds), "seed": options.seed, "say": say}
            how |= {"popen": subprocess.Popen}  # as a user starts it: each process is marked
            words = [word.replace("{url}", server.url) for word in (RUNS | SWEEPS)[kind]]
            in_saves, found = (soak_run if kind in RUNS else soak_sweep)(folder, words, **how)
            minutes = (time.monotonic() - began) / 60
            verdict = f"DIFFERENT: {', '.join(found)}" if found else "equal, nothing left behind"
            counts = f"{how['kills']} kills, {in_saves} in a save, {minutes:.1f} minutes"
            say(f"{kind}: {counts}: {verdict}")
            failed |= bool(found)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
