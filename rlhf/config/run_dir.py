"""Create the directories of runs and the link ``runs/latest``; lock a run while it runs."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime
from pathlib import Path

from rlhf.base.atomic import remove, replace_atomically
from rlhf.base.errors import CheckpointError, ConfigError
from rlhf.base.safe_text import sanitize_for_terminal
from rlhf.base.stored_files import (
    ATTEMPTS,
    INPUTS,
    METRICS,
    PLAN,
    RESULT,
    find_entries,
    open_regular_file,
    read_tail,
)
from rlhf.base.user_paths import expand_user_path
from rlhf.config.choices import Phase
from rlhf.config.freeze import (
    FROZEN,
    is_same_run,
    load_config_to_continue,
    load_frozen_config,
)
from rlhf.config.schema.run import RunConfig

RUNS = Path("runs")
LATEST = RUNS / "latest"
SWEEPS = RUNS / "sweeps"
LOCK = "run.lock"
START_FILES = (INPUTS.name, PLAN.name, "tokenizer", "wandb_id")  # files that a start wrote
WAIT_SECONDS = 10.0  # ranks whose launcher was killed end within about 5 seconds
# Errors of flock: another process has the lock; files cannot be locked there.
HELD_ERRORS = {errno.EAGAIN, errno.EACCES}
NO_LOCK_ERRORS = {errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK}


def make_run_dir(
    config: RunConfig, *, job_dir: Path | None, now: datetime, continues: bool = False
) -> Path:
    """Return the directory of a run: a new one, or that of a stopped run, which is then resumed.

    It is config.run_dir, else ``job_dir`` (for a job of a sweep), else a new folder in runs/. If a
    job was stopped and requeued, ``job_dir`` already holds its run, which is resumed. With
    ``continues`` (resume=auto) the latest unfinished run with this configuration is resumed too.
    """
    if config.run_dir is not None:
        path = expand_user_path(config.run_dir, key="run_dir")
        run_dir = create_run_folder(path, config if continues else None)
    elif job_dir is not None:
        run_dir = create_run_folder(job_dir, config)
    else:
        stopped = _find_stopped_run(RUNS / config.name, config) if continues else None
        run_dir = stopped or _create_unique_folder(RUNS / config.name / f"{now:%Y-%m-%d_%H-%M-%S}")
    if LATEST.is_dir() and not LATEST.is_symlink():
        raise ConfigError(
            f"{LATEST} is a folder: this path is reserved for the link to the latest run; move the "
            "folder away"
        )
    return run_dir


def _find_stopped_run(folder: Path, config: RunConfig) -> Path | None:
    """Return the latest run in ``folder`` that has this configuration and has not finished."""
    for run in (path.parent for path in reversed(find_entries(folder, f"*/{FROZEN}"))):
        if (run / RESULT).exists():
            continue
        try:
            if is_same_run(load_config_to_continue(run), config):
                return run
        except CheckpointError as error:  # a run of another version cannot be compared
            _print_to_stderr(f"resume=auto: {run} is not continued: {error}")
    return None


def refuse_existing_run(path: Path, same: RunConfig | None = None) -> None:
    """Check that ``path`` holds no run, or a run that the configuration ``same`` may resume.

    A run whose ranks ended before they trained is no obstacle. Unless this process has the lock,
    another process may still begin a run there afterwards.
    """
    if (
        (path / FROZEN).exists()
        and not has_trained_nothing(path)
        and (same is None or not is_same_run(load_config_to_continue(path), same))
    ):
        raise ConfigError(
            f"run_dir={path} already holds a run: continue the run with resume={path}, "
            "or choose another run_dir"
        )


def has_trained_nothing(path: Path) -> bool:
    """Return True if ranks were started in ``path``, but logged no metric and began no phase."""
    metrics = path / METRICS
    is_logged = metrics.exists() and metrics.stat().st_size > 0
    has_models = any((path / phase).exists() for phase in Phase)
    return (path / ATTEMPTS).exists() and not is_logged and not has_models


def clear_untrained_run(run_dir: Path) -> None:
    """Remove the files of a run that has trained nothing, so that another run can start here."""
    if has_trained_nothing(run_dir):
        for name in (FROZEN, ATTEMPTS.name, *START_FILES):
            remove(run_dir / name)


def refuse_changed_config(run_dir: Path, written: RunConfig) -> None:
    """Check that ``run_dir`` still has the configuration ``written`` by this command."""
    if replace(load_frozen_config(run_dir), run_dir=None) != replace(written, run_dir=None):
        raise ConfigError(
            f"{run_dir}: another command began or resumed a run in this folder at the same time, "
            "with another configuration; wait until it ends, or choose another run_dir"
        )


def create_run_folder(path: Path, same: RunConfig | None = None) -> Path:
    """Create ``path`` if it does not exist, and return it.

    Raises:
        ConfigError: if ``path`` cannot be created or written, or holds a run whose configuration
            is not ``same``.
    """
    refuse_existing_run(path, same)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _creation_error(path, error) from error
    if not os.access(path, os.W_OK | os.X_OK):
        raise ConfigError(
            f"the run directory {path} is not writable: choose another folder with run_dir=FOLDER"
        )
    return path


def refuse_links(run_dir: Path, names: Iterable[str]) -> None:
    """Check that none of ``names`` in ``run_dir`` is a link, since a run writes these files."""
    for path in (run_dir / name for name in names):
        if path.is_symlink():
            raise CheckpointError(
                f"{path} is a link to {path.readlink()}: a run writes in its own directory only; "
                "put the file or folder itself there"
            )


def _print_to_stderr(line: str) -> None:
    sys.stderr.write(f"{sanitize_for_terminal(line)}\n")


def find_run_dir(name: str | Path | None) -> Path:
    """Return the directory that a tool's argument RUN_DIR names; without it, ``runs/latest``.

    Raises:
        ConfigError: if none is given, and there is no latest run here.
    """
    if name is None and not LATEST.is_dir():
        raise ConfigError(
            f"RUN_DIR: none is given, and there is no {LATEST} in this folder; name the directory "
            "of a run, or start one with python launch.py"
        )
    if name is None:
        _print_to_stderr(f"RUN_DIR: none is given; using {LATEST}, which is {LATEST.resolve()}")
    return expand_user_path(name or LATEST, key="RUN_DIR")


@contextmanager
def lock_run_dir(run_dir: Path, say: Callable[[str], None] = _print_to_stderr) -> Iterator[None]:
    """Acquire the lock of a run directory; the system releases it when this process ends.

    The lock file is kept, and names the process. On a file system without locks, ``say`` prints a
    warning, and the run continues without a lock.

    Raises:
        CheckpointError: if another process still holds the lock after ``WAIT_SECONDS``.
    """
    with open(run_dir / LOCK, "a+", encoding="utf-8", opener=open_regular_file) as file:
        _acquire_lock(file.fileno(), run_dir, say)
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        file.flush()
        yield


def _acquire_lock(descriptor: int, run_dir: Path, say: Callable[[str], None]) -> None:
    deadline = time.monotonic() + WAIT_SECONDS
    is_waiting = False
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except OSError as error:
            if error.errno in NO_LOCK_ERRORS:
                say(
                    f"warning: {run_dir} is on a file system without locks ({error.strerror}): do "
                    "not start a second process on this run"
                )
                return
            if error.errno not in HELD_ERRORS:
                raise
        owner = read_tail(run_dir / LOCK).decode(errors="replace").strip() or "another process"
        if time.monotonic() >= deadline:
            raise CheckpointError(
                f"{run_dir}: {owner} is running this run, and two processes would mix files. Wait "
                "for it or end it (`ps -fp PID` shows it), then resume"
            )
        if not is_waiting:
            say(f"{run_dir}: waiting until {owner}, which is running this run, has ended")
            is_waiting = True
        time.sleep(0.2)


def _create_unique_folder(path: Path, number: int = 1) -> Path:
    """Create ``path``, or ``path``-2, -3, ... if another run started in the same second."""
    candidate = path if number == 1 else path.with_name(f"{path.name}-{number}")
    try:
        candidate.mkdir(parents=True)
    except FileExistsError:
        return _create_unique_folder(path, number + 1)
    except OSError as error:
        raise _creation_error(candidate, error) from error
    return candidate


def _creation_error(path: Path, error: OSError) -> ConfigError:
    return ConfigError(
        f"the run directory {path} cannot be created ({error.strerror}): "
        "choose another folder with run_dir=FOLDER"
    )


def point_latest_to(run_dir: Path, say: Callable[[str], None]) -> None:
    """Point ``runs/latest`` to ``run_dir`` if that is in runs/; called when the run has trained."""
    is_hidden = run_dir.resolve().name.startswith(".")  # a replay, which is removed
    if is_hidden or not run_dir.resolve().is_relative_to(RUNS.resolve()):
        return
    try:
        with replace_atomically(LATEST, shared=True) as link:
            link.symlink_to(run_dir.resolve().relative_to(RUNS.resolve()))
    except OSError as error:
        say(f"warning: {LATEST} cannot be replaced ({error.strerror}): it may name another run")
