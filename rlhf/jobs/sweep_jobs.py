"""Run each job of a sweep in its own process, with its own ranks, cores and devices."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from datetime import timedelta
from math import inf
from pathlib import Path
from typing import NamedTuple, TextIO

from filelock import FileLock, Timeout
from hydra.conf import HydraConf

from rlhf.base.atomic import write_text_atomically
from rlhf.base.command import wait_for_exit
from rlhf.base.cpu import JOBS_ENV
from rlhf.base.errors import INTERRUPTED, CapabilityError, ConfigError, RlhfError
from rlhf.base.stored_files import find_entries, open_regular_file, read_json, read_tail
from rlhf.base.supervisor import be_killed_after
from rlhf.config.choices import Device
from rlhf.config.schema.hardware import HardwareConfig
from rlhf.run.console import Console
from rlhf.run.results import read_objective, read_plan
from rlhf.run.step_alarms import read_alarms

OUTPUT = "output.log"
SPENT = ".spent"  # subfolder of a sweep with the minutes that each job has taken
POLL_SECONDS = 1.0  # between two checks of the minutes that a job has taken
PARENT = "RLHF_PARENT"  # variable with the id of a process; when it ends, launch.py ends too
LAUNCHER = "RLHF_LAUNCHER"  # variable with the process id of launch.py


def end_with_parent() -> None:
    """Let Linux kill this launcher when the process with the id in RLHF_PARENT, if set, ends.

    Set RLHF_LAUNCHER to this launcher's process id, for workers of joblib that it may start.
    """
    os.environ[LAUNCHER] = str(os.getpid())
    if (parent := os.environ.pop(PARENT, None)) is not None:
        _end_with_process(int(parent))


def end_with_launcher() -> None:
    """Let Linux kill this worker of joblib when the launcher ends; otherwise it waits forever.

    In the launcher itself, do nothing.
    """
    if (launcher := int(os.environ[LAUNCHER])) != os.getpid():
        _end_with_process(launcher)


def _end_with_process(parent: int) -> None:
    if be_killed_after(parent):
        sys.stderr.write("the sweep that started this run has ended\n")
        os._exit(1)  # not an exception: a worker of joblib would send it to the ended launcher


class JobError(RlhfError):
    """A job of a sweep that failed; the other jobs are not affected."""


class SweepCap(NamedTuple):
    """The limit on the total minutes of a sweep's jobs, over all commands that continue it."""

    folder: Path
    """The folder of the sweep."""
    minutes: float
    """The limit, by which the minutes of parallel jobs are added up; inf: no limit."""
    word: str
    """The limit as a user gives it, such as dollars=5."""

    def spent(self, job: str | None = None) -> float:
        """Return the minutes that the job ``job`` has taken so far; None: all jobs together."""
        files = find_entries(self.folder, f"{SPENT}/*.json") if job is None else [self.file(job)]
        return sum(read_json(file, float) or 0.0 for file in files)

    def file(self, job: str) -> Path:
        """Return the file with the minutes of a job, which is written while the job runs."""
        return self.folder / SPENT / f"{job}.json"

    def describe_end(self) -> str | None:
        """Return a sentence if the limit is reached; None if it is not."""
        if self.minutes == inf or (spent := self.spent()) < self.minutes:
            return None
        return (
            f"{self.word} is reached after {spent:.2f} minutes; a larger limit continues the sweep"
        )


def read_cap(hydra: HydraConf, hardware: HardwareConfig, jobs: int) -> SweepCap:
    """Return the cap of the sweep that ``hydra`` configures, with ``jobs`` jobs at a time.

    Raises:
        ConfigError: if dollars are limited, and the hardware has no price.
    """
    minutes, dollars = (hydra.sweeper.get(name, inf) for name in ("minutes", "dollars"))
    per_minute = (hardware.price_per_hour or 0.0) * hardware.nodes / jobs / 60
    if dollars < inf and not per_minute:
        raise ConfigError(
            f"dollars={dollars:g}: needs hardware.price_per_hour, the US dollars of a node per "
            "hour; set it, or limit minutes"
        )
    folder = Path(hydra.sweep.dir)
    if dollars < minutes * per_minute:
        return SweepCap(folder, dollars / per_minute, f"dollars={dollars:g}")
    return SweepCap(folder, minutes, f"minutes={minutes:g}")


def run_job(
    hardware: HardwareConfig, run_dir: Path, script: str, cap: SweepCap, *, jobs: int
) -> float | None:
    """Run the job whose configuration is in ``run_dir`` unless it finished; return its objective.

    Return None if ``cap`` is reached: the job does not begin, or is stopped after a step. The job
    prints to ``output.log`` in its folder; the terminal gets two lines. ``jobs`` is how many jobs
    run at a time. If it is above 1, each gets an equal share of the cores and devices.
    """
    say, log = Console().say, run_dir / OUTPUT
    with FileLock(run_dir / "job.lock"):  # wait: the job may still run after its sweep was killed
        if (objective := read_objective(run_dir)) is not None:
            say(f"{run_dir.name}: has finished, objective {objective:.3f}")
            return objective
        if _report_reached_cap(cap, run_dir):
            return None
        hours = (read_plan(run_dir) or {}).get("hours")
        planned = "" if hours is None else f", planned {_duration_text(3600 * hours)}"
        say(f"{run_dir.name}: running{planned}; its output is in {log}")
        started = time.monotonic()
        code = _run_process(hardware, run_dir, script, cap, jobs=jobs)
        took = time.monotonic() - started
        if code in {INTERRUPTED, -signal.SIGTERM} and _report_reached_cap(cap, run_dir):
            return None
        if code or (objective := read_objective(run_dir)) is None:
            raise JobError(
                f"job {run_dir.name} failed with exit code {code}: {_last_line(log)} (its output "
                f"is in {log}). Repeat the command to continue the sweep; finished jobs are skipped"
            )
    alarms = ", ".join(alarm.name for alarm in read_alarms(run_dir))
    raised = f"; alarms: {alarms}" if alarms else ""
    say(f"{run_dir.name}: objective {objective:.3f} after {_duration_text(took)}{raised}")
    return objective


def _report_reached_cap(cap: SweepCap, run_dir: Path) -> bool:
    """Return True if the cap is reached; print it, also to the log, for the list of runs."""
    if (text := cap.describe_end()) is None:
        return False
    Console().say(f"{run_dir.name}: stopped: {text}")
    with open_log(run_dir) as log:
        log.write(f"stopped: {text}\n")
    return True


def open_log(run_dir: Path) -> TextIO:
    """Open a job's output.log to append text; refuse a link."""
    return open(run_dir / OUTPUT, "a", encoding="utf-8", errors="replace", opener=open_regular_file)


def _duration_text(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))


def _last_line(log: Path) -> str:
    lines = read_tail(log).decode(errors="replace").split("\n")
    return next((line for line in reversed(lines) if line.strip()), "it printed nothing")


def _run_process(
    hardware: HardwareConfig, run_dir: Path, script: str, cap: SweepCap, *, jobs: int
) -> int:
    words = [f"resume={run_dir}", "trust_run=true"]
    share: AbstractContextManager[Mapping[str, str]] = nullcontext(os.environ)
    if jobs > 1:
        share = reserve_share_of_machine(hardware, run_dir.parent, jobs)
    with share as environment:
        process = start_process(script, words, run_dir, environment)
        return _wait_within_cap(process, cap, run_dir.name)


def start_process(
    script: str, words: Sequence[str], run_dir: Path, environment: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    """Start launch.py with ``words``; it logs in ``run_dir``, and ends when this process ends."""
    env = {**environment, PARENT: str(os.getpid())}
    with open_log(run_dir) as log:
        return subprocess.Popen([sys.executable, script, *words], env=env, stdout=log, stderr=log)


def _wait_within_cap(process: subprocess.Popen[bytes], cap: SweepCap, job: str) -> int:
    """Return the exit code of a job; store its minutes, and send it SIGTERM at the cap."""
    started, before, code, is_stopping = time.monotonic(), cap.spent(job), None, False
    cap.file(job).parent.mkdir(parents=True, exist_ok=True)
    while code is None:
        with suppress(subprocess.TimeoutExpired):
            code = wait_for_exit(process, POLL_SECONDS)
        minutes = before + (time.monotonic() - started) / 60
        write_text_atomically(cap.file(job), f"{minutes}\n")
        if not is_stopping and cap.describe_end() is not None:
            process.send_signal(signal.SIGTERM)  # the run ends its step and writes a checkpoint
            is_stopping = True
    return code


@contextmanager
def reserve_share_of_machine(
    hardware: HardwareConfig, sweep_dir: Path, jobs: int
) -> Iterator[dict[str, str]]:
    """Reserve one of ``jobs`` equal shares of cores and devices; yield the environment for a job.

    A share is reserved by a lock on a file in ``sweep_dir``, so it holds across processes.
    """
    number, lock = _acquire_share(sweep_dir / ".shares", jobs)
    try:
        environment, cores = resources_of_share(hardware, number, jobs)
        with use_cores(cores):
            yield environment
    finally:
        lock.release()


@contextmanager
def use_cores(cores: Iterable[int]) -> Iterator[None]:
    """Let this process, and processes that it starts in the block, use only ``cores``."""
    all_cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, all_cores)


def resources_of_share(
    hardware: HardwareConfig, number: int, jobs: int
) -> tuple[dict[str, str], set[int]]:
    """Return the environment and the cores for share ``number`` of ``jobs`` equal shares.

    Raises:
        CapabilityError: if this machine has too few devices for the jobs.
    """
    environment, ranks = os.environ | {JOBS_ENV: str(jobs)}, hardware.ranks_per_node
    devices = _visible_devices() if hardware.device is Device.cuda else []
    if devices and len(devices) < jobs * ranks:
        raise CapabilityError(
            f"{jobs} jobs at a time with hardware.ranks_per_node={ranks} need {jobs * ranks} "
            f"devices, and this machine has {len(devices)}: use fewer jobs at a time"
        )
    if devices:
        share = devices[number * ranks : (number + 1) * ranks]
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(share)
    cores = sorted(os.sched_getaffinity(0))
    return environment, set(cores[number::jobs] or cores)


@contextmanager
def restrict_plans_to_share(hardware: HardwareConfig, jobs: int | None) -> Iterator[None]:
    """Make plans in the block use only the cores and memory that one of ``jobs`` jobs gets."""
    if jobs is None or jobs == 1:
        yield
        return
    environment, cores = resources_of_share(hardware, 0, jobs)
    os.environ[JOBS_ENV] = environment[JOBS_ENV]
    try:
        with use_cores(cores):
            yield
    finally:
        del os.environ[JOBS_ENV]


def _acquire_share(folder: Path, jobs: int) -> tuple[int, FileLock]:
    """Wait for a free share; return its number and the lock that holds it."""
    folder.mkdir(parents=True, exist_ok=True)
    while True:
        for number in range(jobs):
            lock = FileLock(folder / str(number))
            with suppress(Timeout):
                lock.acquire(blocking=False)
                return number, lock
        time.sleep(0.5)


def _visible_devices() -> list[str]:
    """Return the names of the GPUs, or of the MIG devices, that this process may use.

    Raises:
        CapabilityError: if nvidia-smi cannot name them.
    """
    allowed = os.environ.get("CUDA_VISIBLE_DEVICES")
    if allowed is not None:
        return [name for name in allowed.split(",") if name]
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        output = getattr(error, "stdout", "") or str(error)
        raise CapabilityError(
            f"hardware.device=cuda: nvidia-smi cannot name the GPUs ({output.splitlines()[0]}): "
            "set CUDA_VISIBLE_DEVICES=0,1,... to those that the jobs may use"
        ) from error
    parts: dict[str, list[str]] = {}
    for line in listed.stdout.splitlines():
        if gpu := re.match(r"GPU (\d+):", line):
            parts[gpu[1]] = []
        elif part := re.search(r"\(UUID: (MIG-[^)]+)\)", line):
            parts[next(reversed(parts))].append(part[1])
    return [name for gpu, names in parts.items() for name in names or [gpu]]
