"""Run each job of a sweep in its own process, with its own ranks, cores and devices."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import TextIO

from filelock import FileLock, Timeout

from rlhf.base.command import wait_for_exit
from rlhf.base.cpu import SHARED_BY
from rlhf.base.errors import CapabilityError, RlhfError
from rlhf.base.stored_files import open_regular_file
from rlhf.base.supervisor import be_killed_after
from rlhf.config.choices import Device
from rlhf.config.schema.hardware import HardwareConfig
from rlhf.run.console import build_console
from rlhf.run.results import read_objective, read_plan
from rlhf.run.step_alarms import read_alarms

OUTPUT = "output.log"
PARENT = "RLHF_PARENT"  # variable with the id of a process; when it ends, launch.py ends too
LAUNCHER = "RLHF_LAUNCHER"  # variable with the process id of launch.py


def end_with_parent() -> None:
    """Let Linux kill this launcher when the process with the id in RLHF_PARENT ends.

    Set RLHF_LAUNCHER to this launcher's process id, for workers of joblib that it may start.
    """
    os.environ[LAUNCHER] = str(os.getpid())
    if (parent := os.environ.pop(PARENT, None)) is not None:
        _end_with_process(int(parent))


def end_with_launcher() -> None:
    """Let Linux kill this worker of joblib when the launcher ends; else it would wait forever.

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


def run_job(hardware: HardwareConfig, run_dir: Path, script: str, *, jobs: int) -> float:
    """Run the job that is frozen in ``run_dir``, unless it has finished; return its objective.

    The job prints to ``output.log`` in its folder; the terminal gets two lines. ``jobs`` is how
    many jobs run at a time. If it is above 1, each gets an equal share of the cores and devices.
    """
    say, log = build_console(is_main=True, log_every=1).say, run_dir / OUTPUT
    with FileLock(run_dir / "job.lock"):  # wait: the job may still run after its sweep was killed
        if (objective := read_objective(run_dir)) is not None:
            say(f"{run_dir.name}: has finished, objective {objective:.3f}")
            return objective
        hours = (read_plan(run_dir) or {}).get("hours")
        planned = "" if hours is None else f", planned {_duration_text(3600 * hours)}"
        say(f"{run_dir.name}: runs{planned}; its screen is in {log}")
        started = time.monotonic()
        code = _run_process(hardware, run_dir, script, jobs=jobs)
        took = time.monotonic() - started
        if code or (objective := read_objective(run_dir)) is None:
            raise JobError(
                f"job {run_dir.name} failed with exit code {code}: {_last_line(log)} (its output "
                f"is in {log}). The same command again continues the sweep without its finished "
                "jobs"
            )
    alarms = ", ".join(alarm.name for alarm in read_alarms(run_dir))
    raised = f"; alarms: {alarms}" if alarms else ""
    say(f"{run_dir.name}: objective {objective:.3f} after {_duration_text(took)}{raised}")
    return objective


def open_log(run_dir: Path) -> TextIO:
    """Open a job's output.log to append text; refuse a link."""
    return open(run_dir / OUTPUT, "a", encoding="utf-8", errors="replace", opener=open_regular_file)


def _duration_text(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))


def _last_line(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").split("\n")
    return next((line for line in reversed(lines) if line.strip()), "it printed nothing")


def _run_process(hardware: HardwareConfig, run_dir: Path, script: str, *, jobs: int) -> int:
    command = [sys.executable, script, f"resume={run_dir}"]
    share: AbstractContextManager[Mapping[str, str]] = nullcontext(os.environ)
    if jobs > 1:
        share = reserve_share_of_machine(hardware, run_dir.parent, jobs)
    with share as environment, open_log(run_dir) as out:
        own = {**environment, PARENT: str(os.getpid())}
        return wait_for_exit(subprocess.Popen(command, env=own, stdout=out, stderr=out))


@contextmanager
def reserve_share_of_machine(
    hardware: HardwareConfig, sweep_dir: Path, jobs: int
) -> Iterator[dict[str, str]]:
    """Reserve one of ``jobs`` equal shares of cores and devices; yield the environment for a job.

    A share is reserved by a lock on a file in ``sweep_dir``, so it holds across processes.
    """
    number, lock = _acquire_share(sweep_dir / ".shares", jobs)
    all_cores = os.sched_getaffinity(0)
    try:
        environment, cores = resources_of_share(hardware, number, jobs)
        os.sched_setaffinity(0, cores)  # the job's process inherits these cores
        yield environment
    finally:
        os.sched_setaffinity(0, all_cores)
        lock.release()


def resources_of_share(
    hardware: HardwareConfig, number: int, jobs: int
) -> tuple[dict[str, str], set[int]]:
    """Return the environment and the cores for share ``number`` of ``jobs`` equal shares.

    Raises:
        CapabilityError: if this machine has too few devices for the jobs.
    """
    environment, ranks = os.environ | {SHARED_BY: str(jobs)}, hardware.ranks_per_node
    devices = _visible_devices() if hardware.device is Device.cuda else []
    if devices and len(devices) < jobs * ranks:
        raise CapabilityError(
            f"{jobs} jobs at a time with hardware.ranks_per_node={ranks} need {jobs * ranks} "
            f"devices, and this machine has {len(devices)}: use fewer jobs at a time"
        )
    if devices:
        own = devices[number * ranks : (number + 1) * ranks]
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(own)
    cores = sorted(os.sched_getaffinity(0))
    return environment, set(cores[number::jobs] or cores)


@contextmanager
def restrict_plans_to_share(hardware: HardwareConfig, jobs: int | None) -> Iterator[None]:
    """Make plans in the context use only the cores and memory that one of ``jobs`` jobs gets."""
    if jobs is None or jobs == 1:
        yield
        return
    all_cores, (environment, cores) = os.sched_getaffinity(0), resources_of_share(hardware, 0, jobs)
    os.environ[SHARED_BY] = environment[SHARED_BY]
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, all_cores)
        del os.environ[SHARED_BY]


def _acquire_share(folder: Path, jobs: int) -> tuple[int, FileLock]:
    """Wait for a free share; return its number and the lock that holds it."""
    folder.mkdir(parents=True, exist_ok=True)
    while True:
        for number in range(jobs):
            lock = FileLock(folder / str(number))
            try:
                lock.acquire(blocking=False)
            except Timeout:
                continue
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
        said = getattr(error, "stdout", "") or str(error)
        raise CapabilityError(
            f"hardware.device=cuda: nvidia-smi cannot name the GPUs ({said.splitlines()[0]}): set "
            "CUDA_VISIBLE_DEVICES=0,1,... to those that the jobs may use"
        ) from error
    parts: dict[str, list[str]] = {}
    for line in listed.stdout.splitlines():
        if gpu := re.match(r"GPU (\d+):", line):
            parts[gpu[1]] = []
        elif part := re.search(r"\(UUID: (MIG-[^)]+)\)", line):
            parts[next(reversed(parts))].append(part[1])
    return [name for gpu, own in parts.items() for name in own or [gpu]]
