"""RLHF from one launcher: supervised fine-tuning, a reward model, and PPO or DPO on DeepSpeed.

``import rlhf`` itself imports nothing heavy; the names below are imported on first use.
"""

from __future__ import annotations

import importlib
import os
import resource
import sys

if resource.getrlimit(resource.RLIMIT_FSIZE)[0] != resource.RLIM_INFINITY:
    # Python would store bytecode truncated at this limit (ulimit -f), and fail at later starts.
    sys.dont_write_bytecode = True
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"  # for child processes
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlhf.config.freeze import load_run
    from rlhf.phases.ppo.loop import PPOTrainer
    from rlhf.phases.ppo.rlhf_engine import RLHFEngine
    from rlhf.runs.notebook import Run, compose, launch

__all__ = ["PPOTrainer", "RLHFEngine", "Run", "compose", "launch", "load_run"]

MODULES = {
    "PPOTrainer": "rlhf.phases.ppo.loop",
    "RLHFEngine": "rlhf.phases.ppo.rlhf_engine",
    "Run": "rlhf.runs.notebook",
    "compose": "rlhf.runs.notebook",
    "launch": "rlhf.runs.notebook",
    "load_run": "rlhf.config.freeze",
}


def __getattr__(name: str) -> Any:
    if name not in MODULES:
        raise AttributeError(
            f"module 'rlhf' has no attribute {name!r}; it has {', '.join(__all__)}"
        )
    return getattr(importlib.import_module(MODULES[name]), name)
