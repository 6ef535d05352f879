"""Trackers that disturb a run on purpose: one limits its GPU memory, the other kills it once."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from rlhf.base.errors import CheckpointError
from rlhf.checkpoint.results import read_plan
from rlhf.config.machine_rates import GIB
from rlhf.tracking.tracker import Tracker

LESS_MEMORY = "rlhf.gpu_check.hooks:LessMemory"
KILL_ONCE = "rlhf.gpu_check.hooks:KillOnce"
SHARE = 0.6  # share of the memory planned for SFT that torch may use
KILLED_PHASE, KILLED_STEP = "ppo", 2


class LessMemory(Tracker):
    """Imitates a GPU that is too small: torch may use only a share of the memory planned for SFT.

    The limit stays the same when the run is retried, so smaller micro-batches may fit.
    """

    def __init__(self, _: Any, run_dir: Path) -> None:
        total = torch.cuda.get_device_properties(0).total_memory / GIB
        torch.cuda.set_per_process_memory_fraction(SHARE * planned_gib(run_dir, "sft") / total)


class KillOnce(Tracker):
    """Kills its process in a PPO step, before the step's metrics are on the drive.

    A file beside the run directory marks the run as killed, so that it is not killed again.
    """

    def __init__(self, _: Any, run_dir: Path) -> None:
        self._killed = killed_marker_file(run_dir)

    def log(self, phase: str, step: int, values: Mapping[str, float]) -> None:  # noqa: ARG002
        """Kill this process at step ``KILLED_STEP`` of PPO, unless the marker file exists."""
        if (phase, step) == (KILLED_PHASE, KILLED_STEP) and not self._killed.exists():
            self._killed.touch()
            os.kill(os.getpid(), signal.SIGKILL)


def killed_marker_file(run_dir: Path) -> Path:
    """Return the file that keeps ``KillOnce`` from killing the run in ``run_dir``."""
    return run_dir.with_suffix(".killed")


def planned_gib(run_dir: Path, phase: str) -> float:
    """Return the torch memory in GiB that the plan expects for ``phase``, without CUDA's own.

    Raises:
        CheckpointError: if the run has no plan.
    """
    plan = read_plan(run_dir)
    if plan is None:
        raise CheckpointError(f"{run_dir} has no plan.json")
    memory = plan["phases"][phase]["memory"]
    return float(sum(gib for part, gib in memory.items() if part != "process"))
