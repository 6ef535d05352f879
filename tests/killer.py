"""Trackers that disturb a run: ``Killer`` kills it at KILL_AT, ``Sleeper`` makes a step hang.

``Greedy`` needs more memory than there is, unless micro-batches are small. ``DenormalFinder`` ends
a run whose threads compute with denormal numbers.

KILL_AT is PHASE:STEP, before the metrics of the step are on the drive; PHASE:STEP:update, inside
the updates of a rollout; or PHASE:STEP:save, when half of the checkpoint of the step is written.
"""

import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

import torch

from rlhf.base.ranks import Ranks
from rlhf.options.replay import weight_digests
from rlhf.phases import sft
from rlhf.phases.ppo import loop
from rlhf.phases.shared import checkpoints
from rlhf.run.tracker import Tracker
from rlhf.run.trackers import FileTracker

PATH = "tests.killer:Killer"


class Killer(Tracker):
    """Kills its process at the moment that KILL_AT names."""

    def __init__(self, *_: object) -> None:
        self._phase, step, self._moment = (os.environ.get("KILL_AT", "") + "::").split(":")[:3]
        self._step = int(step or 0)
        self._updates = 0  # of the step in progress
        # Processes are forked for each run: nothing outlives it.
        if self._moment == "update":
            loop.step_optimizers_together = self._step_together(loop.step_optimizers_together)
        if self._moment == "save":
            checkpoints.write_checkpoint = self._write_checkpoint(checkpoints.write_checkpoint)

    def log(self, phase: str, step: int, values: Mapping[str, float]) -> None:
        self._updates = 0
        self._logged = (phase, step)
        if not self._moment and (phase, step) == (self._phase, self._step):
            kill()

    def _step_together(self, original: Any) -> Any:
        def step_optimizers_together(*args: Any, **how: Any) -> Any:
            self._updates += 1
            if self._updates == 2 and self._logged == (self._phase, self._step - 1):
                kill()
            return original(*args, **how)

        return step_optimizers_together

    def _write_checkpoint(self, original: Any) -> Any:
        def write_checkpoint(
            phase_dir: Path, step: int, streams: Mapping[str, Any], *args: Any, **how: Any
        ) -> None:
            if (phase_dir.name, step) == (self._phase, self._step):
                streams = {name: cut_off(stream) for name, stream in streams.items()}
            original(phase_dir, step, streams, *args, **how)

        return write_checkpoint


class OfTrainingThread(Tracker):
    """Calls ``log_step`` in the thread that trains; trackers have a thread of their own."""

    def __init__(self, *_: object) -> None:
        original = FileTracker.log

        def log(files: FileTracker, phase: str, step: int, values: Mapping[str, float]) -> None:
            self.log_step(phase, step)
            original(files, phase, step, values)

        FileTracker.log = log  # type: ignore[method-assign]

    def log_step(self, phase: str, step: int) -> None:
        raise NotImplementedError


class DenormalFinder(OfTrainingThread):
    """Ends the process if the thread that trains computes with denormal numbers."""

    def log_step(self, phase: str, step: int) -> None:
        products = torch.full((2**22,), 2e-38) * 0.25
        if products.view(torch.int32).any():
            os._exit(7)


class Disturber(Tracker):
    """Changes one weight of the critic after the step that DISTURB_AT names, PHASE:STEP."""

    def __init__(self, *_: object) -> None:
        self._logged, original = "", weight_digests.sum_digests

        def sum_digests(engines: Mapping[str, Any], ranks: Ranks) -> dict[str, str]:
            if self._logged == os.environ.get("DISTURB_AT"):
                with torch.no_grad():
                    next(engines["critic"].module.parameters()).view(-1)[7] += 0.1
            return original(engines, ranks)

        weight_digests.sum_digests = sum_digests

    def log(self, phase: str, step: int, values: Mapping[str, float]) -> None:
        self._logged = f"{phase}:{step}"


def kill() -> NoReturn:
    """Kill this process."""
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("unreachable")


def cut_off(stream: Any) -> Any:
    """Yield the first tensors of a checkpoint, then kill the process."""
    for number, tensor in enumerate(stream):
        if number == 3:
            kill()
        yield tensor


class Sleeper(OfTrainingThread):
    """Sleeps in the first step, as if the step did not end."""

    def __init__(self, _: object, run_dir: Path) -> None:
        super().__init__()
        self._run_dir = run_dir

    def log_step(self, phase: str, step: int) -> None:
        if step == 1:
            (self._run_dir / "asleep").touch()
            time.sleep(300)


class Greedy(Tracker):
    """Really fails to allocate memory in the second step of SFT with micro-batches above 4."""

    def __init__(self, _: object, run_dir: Path) -> None:
        taken, train_step = [], sft.SftTrainer.train_step

        def greedy(trainer: Any, rows: Any) -> Any:
            taken.append(rows)
            if len(taken) == 2 and trainer.plan.micro > 4:
                torch.empty(1 << 48)
            return train_step(trainer, rows)

        sft.SftTrainer.train_step = greedy
        with (run_dir / "processes.txt").open("a") as file:
            file.write(f"{os.getpid()}\n")
