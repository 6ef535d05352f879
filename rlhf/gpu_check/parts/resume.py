"""Compare a run that is killed in a PPO step and resumed with a run that nobody killed."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from rlhf.config.choices import Device, Dtype
from rlhf.engine.devices import resolve_dtype
from rlhf.gpu_check.rows import CheckSetting, Finding, Task, checked_finding, skipped_finding
from rlhf.gpu_check.runs import TINY_RUN, differing_files, resume_run, run_to_end
from rlhf.run.tracker import Tracker

KILLED_PHASE, KILLED_STEP = "ppo", 2
WORDS = (
    *("hardware=auto", "phase.order=[sft,ppo]", "model@reward_model=gold"),
    *("checkpoint.every_steps=1", "tracking.others=[rlhf.gpu_check.parts.resume:KillOnce]"),
)
EXPECTED = "equal bit for bit: weights, metrics, samples"


class KillOnce(Tracker):
    """A tracker that kills its process in a PPO step, before the step's metrics are written.

    A file beside the run directory marks the run as killed, so that it is not killed again.
    """

    def __init__(self, _: Any, run_dir: Path) -> None:
        self._killed = _killed_marker_file(run_dir)

    def log(self, phase: str, step: int, values: Mapping[str, float]) -> None:  # noqa: ARG002
        """Kill this process at step ``KILLED_STEP`` of PPO, unless the marker file exists."""
        if (phase, step) == (KILLED_PHASE, KILLED_STEP) and not self._killed.exists():
            self._killed.touch()
            os.kill(os.getpid(), signal.SIGKILL)


def _killed_marker_file(run_dir: Path) -> Path:
    """Return the path of the marker file; if it exists, ``KillOnce`` does not kill the run."""
    return run_dir.with_suffix(".killed")


def tasks(setting: CheckSetting) -> Iterator[Task]:
    """Yield a task for each training engine that can run here."""
    places = {"DeepSpeed, stage 2": ("zero=stage2", "zero.engine=deepspeed")}
    if resolve_dtype(Dtype.auto, Device.cuda) is Dtype.bf16:  # fp16 needs DeepSpeed
        places = {"torch, stage 1": ("zero=stage1", "zero.engine=torch"), **places}
    for name, words in places.items():
        folder = setting.folder / words[0].partition("=")[2]
        yield Task(name, partial(_compare_with_killed_run, folder, (*TINY_RUN, *WORDS, *words)))


def _compare_with_killed_run(folder: Path, words: tuple[str, ...]) -> Finding:
    folder.mkdir()
    killed = run_to_end(folder / "killed", *words)
    if not killed.code or not _killed_marker_file(killed.run_dir).exists():
        return checked_finding(False, "it was not killed", EXPECTED)
    _ = resume_run(killed.run_dir).result  # a run that failed raises here
    whole = _run_without_kill(folder / "whole", words)
    if not (found := differing_files(killed.run_dir, whole)):
        return checked_finding(True, "equal", EXPECTED)
    # If two runs without a kill differ too, nondeterministic kernels are the reason, not resuming.
    if differing_files(_run_without_kill(folder / "again", words), whole):
        figure = "two runs that nobody killed differ too: this GPU's kernels add in any order"
        return skipped_finding(figure, EXPECTED)
    return checked_finding(False, f"different: {', '.join(found)}", EXPECTED)


def _run_without_kill(run_dir: Path, words: tuple[str, ...]) -> Path:
    """Start a run with the marker file, so that ``KillOnce`` does nothing; return ``run_dir``."""
    _killed_marker_file(run_dir).touch()
    _ = run_to_end(run_dir, *words).result  # a run that failed raises here
    return run_dir
