"""Compare a run that is killed in a PPO step and resumed with a run that nobody killed."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from rlhf.gpu_check.pipelines import words_by_run
from rlhf.gpu_check.rows import CheckRow, Size, Task, checked_row, skipped_row
from rlhf.gpu_check.runs import SIDE_BY_SIDE, differing_files, resume_run, run_to_end
from rlhf.run.tracker import Tracker

KILLED_PHASE, KILLED_STEP = "ppo", 2
CUBLAS = "CUBLAS_WORKSPACE_CONFIG=:4096:8"  # makes cuBLAS deterministic; CUDA's start reads it
EXPECTED = "equal bit for bit: weights, metrics, samples"


class KillOnce(Tracker):
    """A tracker that kills its process in a PPO step, before the step's metrics are written.

    A file beside the run directory marks the run as killed, so that it is not killed again. The
    tracker also makes torch compute deterministically where it can.
    """

    def __init__(self, _: Any, run_dir: Path) -> None:
        self._killed = _killed_marker_file(run_dir)
        torch.use_deterministic_algorithms(True, warn_only=True)

    def log(self, phase: str, step: int, values: Mapping[str, float]) -> None:  # noqa: ARG002
        """Kill this process at step ``KILLED_STEP`` of PPO, unless the marker file exists."""
        if (phase, step) == (KILLED_PHASE, KILLED_STEP) and not self._killed.exists():
            self._killed.touch()
            os.kill(os.getpid(), signal.SIGKILL)


def _killed_marker_file(run_dir: Path) -> Path:
    """Return the path of the marker file; if it exists, ``KillOnce`` does not kill the run."""
    return run_dir.with_suffix(".killed")


def check_resume(folder: Path, _: Size) -> Iterator[Task]:
    """Yield a task for each training engine that can run here."""
    futures = {}
    for name, words in words_by_run("resume").items():
        arguments = folder / name.partition(",")[0], f"KILLED {CUBLAS} {words}"
        futures[name] = SIDE_BY_SIDE.submit(_compare_with_killed_run, *arguments)
    yield from ((name, future.result) for name, future in futures.items())


def _compare_with_killed_run(folder: Path, words: str) -> CheckRow:
    folder.mkdir()
    killed = run_to_end(folder / "killed", words)
    if not killed.code or not _killed_marker_file(killed.run_dir).exists():
        return checked_row(False, f"the run was not killed: {killed.last_line}", EXPECTED)
    resumed = resume_run(killed.run_dir, CUBLAS).finished_dir
    whole = _run_without_kill(folder / "whole", words)
    if not (names := differing_files(resumed, whole)):
        return checked_row(True, "equal", EXPECTED)
    # If two runs that nobody killed differ too, nondeterministic kernels are the reason.
    if differing_files(_run_without_kill(folder / "again", words), whole):
        figure = "two uninterrupted runs also differ, despite deterministic algorithms"
        return skipped_row(figure, EXPECTED)
    return checked_row(False, f"different: {', '.join(names)}", EXPECTED)


def _run_without_kill(run_dir: Path, words: str) -> Path:
    """Start a run with the marker file, so that ``KillOnce`` does nothing; return ``run_dir``."""
    _killed_marker_file(run_dir).touch()
    return run_to_end(run_dir, words).finished_dir
