"""Write checkpoints of a phase in progress, remove old ones, and resume from the last one."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from rlhf.base.errors import CheckpointError, RlhfError
from rlhf.base.types import Stateful, StatefulWithTensors
from rlhf.config.choices import Phase
from rlhf.config.run_dir import point_latest_to
from rlhf.config.schema.run import AlarmName
from rlhf.options import CheckpointConfig
from rlhf.phases.shared.context import RunContext
from rlhf.phases.shared.step_signals import StoppedError
from rlhf.run.jsonl import LOGS
from rlhf.run.phase_state import (
    STATE_JSON,
    BestStep,
    Checkpoint,
    SkippedError,
    checkpoint_folder,
    checkpoint_folders,
    load_checkpoint,
    remove_stale_checkpoints,
    write_checkpoint,
)
from rlhf.run.trackers import StoppedByAlarmError


class Checkpoints:
    """A loop over the steps of one phase, which writes checkpoints and resumes from the last one.

    ``results`` are values that the phase needs at its end; checkpoints store them. With
    ``loads_best`` the phase ends with the models of the step that had the best evaluation.
    """

    def __init__(
        self,
        context: RunContext,
        phase: Phase,
        engines: Mapping[str, StatefulWithTensors],
        trainer: Stateful | None = None,
    ) -> None:
        self._context = context
        self._config = context.config.checkpoint
        self.phase = phase
        self._dir: Path = context.run_dir / phase
        self._engines = engines
        self._trainer = trainer
        self._seconds = 0.0  # seconds that earlier attempts at this phase took
        self._saved_at, self._saved_step, self._total = time.monotonic(), 0, 0
        self._best = BestStep.from_config(self._config, phase)
        self.loads_best = self._config.load_best and self._best.metric is not None
        self._is_over = False
        self._alarm: StoppedByAlarmError | None = None  # an alarm of this step that ends the run
        self._skipped = 0  # steps in a row in which every optimizer step was skipped
        self.step = 0
        self.results: dict[str, Any] = {}
        self._can_write = context.config.zero.nvme_path is None
        if not self._can_write:
            context.console.say(
                f"{phase}: no checkpoints inside the phase, since zero.nvme_path keeps the "
                "optimizer on a drive; a stopped run repeats the phase"
            )
        if (resumed := context.resumes.get(phase)) is not None:
            try:
                self._resume_from(resumed)
            except (LookupError, TypeError, ValueError, AttributeError) as error:
                raise CheckpointError(
                    f"{resumed.folder / STATE_JSON} is not the state of this phase ({error!r}): "
                    "remove the folder, and the run resumes from the checkpoint before it"
                ) from error
        if context.ranks.is_main:
            remove_stale_checkpoints(self._dir, last_step=self.step)

    @property
    def is_resumed(self) -> bool:
        """Return True if the phase continues from a checkpoint."""
        return self.step > 0

    @property
    def models_step(self) -> int:
        """Return the step whose models the finished phase has: the last step.

        With checkpoint.load_best it is the best step, unless no evaluation returned a number.
        """
        best = self._best.step
        return best if self.loads_best and best is not None else self.step

    def totals(self) -> dict[str, Any]:
        """Return entries of result.json: steps, seconds and, with load_best, the best step.

        ``best_value`` is the value of checkpoint.best after the step ``best_step``.
        """
        best = {"best_step": self._best.step, "best_value": self._best.value}
        is_known = self.loads_best and self._best.step is not None
        return {"steps": self.step, "seconds": self.elapsed_seconds} | (best if is_known else {})

    @property
    def elapsed_seconds(self) -> float:
        """Return the seconds that the phase has taken, in all its attempts."""
        return self._seconds + time.monotonic() - self._context.phase_started

    def steps(self, total: int) -> Iterator[int]:
        """Yield the number of each step to take; after each step, write a checkpoint if one is due.

        The steps end early if checkpoint.patience is used up or ``end_after_this_step`` is called.
        After the last step, checkpoint.load_best restores the models of the best step.

        Before StoppedError and StoppedByAlarmError a checkpoint is written, except with
        zero.nvme_path, or if a network drive refuses it.

        Raises:
            StoppedError: if a signal or checkpoint.stop_after requested a stop.
            StoppedByAlarmError: if alarms.stop names an alarm of the step.
            CheckpointError: if a checkpoint cannot be written.
        """
        self._total = total
        while self.step < total and not self._is_over:
            self._context.heartbeat.start()
            yield self.step + 1
            self.step += 1
            if self.step == 1 and self._context.ranks.is_main:
                point_latest_to(self._context.run_dir, self._context.console.say)
            self._finish_step()
        self._context.heartbeat.stop()
        if (step := self.models_step) != self.step:
            folder = checkpoint_folder(self._dir, step)
            _load_engines(self._engines, load_checkpoint(folder, self._context.ranks))
            self._context.console.say(f"{self.phase}: ends with the models of step {step}")

    def end_after_this_step(self, why: str) -> None:
        """End the phase after the current step."""
        self._is_over = True
        self._context.console.say(f"{self.phase}: ends after step {self.step + 1}: {why}")

    @property
    def is_last_step(self) -> bool:
        """Return True if the phase ends after the current step."""
        return self._is_over or self.step + 1 == self._total

    def is_evaluation_due(self, every: int) -> bool:
        """Return True if the models must be evaluated after the current step.

        It is due every ``every`` steps (0: never), but after the last step only with
        ``loads_best``: otherwise the final evaluation of the phase measures the same models.
        """
        if self.is_last_step:
            return self.loads_best
        return every > 0 and (self.step + 1) % every == 0

    def log_step(self, values: Mapping[str, float], *, optimizer_steps: float = 1) -> None:
        """Log the metrics of the current step, and count steps in which no weight was updated.

        ``optimizer_steps`` is the number of optimizer steps in this step, including skipped ones.

        Raises:
            RlhfError: if checkpoint.most_skipped steps in a row updated no weight.
        """
        self._log(values, self.step + 1)
        is_skipped = values[f"{self.phase}/skipped_steps"] == optimizer_steps
        self._skipped = self._skipped + 1 if is_skipped else 0
        if self._skipped == self._config.most_skipped:
            raise RlhfError(
                f"{self.phase}: no optimizer step could be taken in {self._skipped} steps in a row "
                f"up to step {self.step + 1}, since gradients were not finite. Start again with a "
                f"lower learning rate, or hardware.dtype=fp32; {_export_advice(self._dir)}"
            )

    def log_evaluation(self, values: Mapping[str, float], *, is_frozen: bool = False) -> None:
        """Log held-out metrics, and end the phase if checkpoint.patience is used up.

        If the policy ``is_frozen`` in this step, no patience is used up.

        Raises:
            ConfigError: if ``values`` lack the metric that checkpoint.best names.
        """
        self._log(values, self.step + 1)
        reason = self._best.update(values, self.step + 1, is_frozen=is_frozen)
        if reason is not None and not self._is_over:
            self.end_after_this_step(reason)

    def log_held_out(
        self, values: Mapping[str, float], more: Mapping[str, float] | None = None
    ) -> None:
        """Log held-out metrics of the models before the first step, or after the last step.

        With checkpoint.load_best, only ``more`` is logged after the last step: ``log_evaluation``
        has logged the final models. An alarm before the first step ends the run after the first
        step's checkpoint. After the last step only not_finite does; the phase saves its models.
        """
        logged = {**({} if self.loads_best and self.step > 0 else values), **(more or {})}
        if logged:
            self._log(logged, self.step)

    def _log(self, values: Mapping[str, float], step: int) -> None:
        """Log metrics of ``step``; an alarm ends the run after the next checkpoint.

        The alarm not_finite ends the run at once, without a checkpoint of the damaged weights.
        """
        try:
            self._context.tracker.log(self.phase, step, values)
        except StoppedByAlarmError as error:
            if error.alarm.name == AlarmName.not_finite:
                raise
            self._alarm = error

    def _finish_step(self) -> None:
        context, requests = self._context, self._context.requests
        is_last = self._is_over or self.step == self._total
        if self._can_write and self._config.digest_every > 0:
            from rlhf.options.replay.weight_digests import observe_step

            observe_step(context, self.phase, self.step, self._engines, is_last=is_last)
        if self._config.stop_after == f"{self.phase}/{self.step}":
            requests.wants_checkpoint = requests.wants_stop = True
        # Rank 0 reads the clock for all ranks. While steps are skipped, no checkpoint becomes due.
        minutes = (time.monotonic() - self._saved_at) / 60 if context.ranks.is_main else 0.0
        is_due = _is_due(self._config, self._saved_step, self.step, minutes) and not self._skipped
        is_due |= requests.wants_checkpoint or self._alarm is not None
        is_due &= self._can_write
        flags = torch.tensor([is_due, requests.wants_stop], device=context.ranks.device)
        is_due, stops = context.ranks.max(flags.int()).bool().tolist()
        if is_due or self._best.step == self.step:
            self._save_checkpoint()
            requests.wants_checkpoint = False
        if self._alarm is not None:
            raise self._alarm
        if stops:
            raise StoppedError(f"stopped after {self.phase} step {self.step}")

    def _save_checkpoint(self) -> None:
        tensors = {name: engine.training_state for name, engine in self._engines.items()}
        streams = {name: each.stream() for name, each in tensors.items()}
        logs = [self._context.run_dir / name for name in LOGS]
        state = {
            "engines": {name: engine.state_dict() for name, engine in self._engines.items()},
            "trainer": self._trainer.state_dict() if self._trainer is not None else {},
            "results": self.results,
            "seconds": self.elapsed_seconds,
            "logs": {path.name: path.stat().st_size for path in logs if path.exists()},
            "best": [self._best.value, self._best.step, self._best.waits, self._is_over],
        }
        size, ranks = sum(each.total_bytes for each in tensors.values()), self._context.ranks
        try:
            write_checkpoint(self._dir, self.step, streams, state, wanted_bytes=size, ranks=ranks)
            if ranks.is_main:
                _remove_old_checkpoints(self._dir, self._config.keep, best=self._best.step)
        except SkippedError as error:
            if self._best.step == self.step:
                raise  # without this checkpoint, the models of the best step would be lost
            self._context.console.say(f"warning: {error}")
        self._saved_at, self._saved_step = time.monotonic(), self.step

    def _resume_from(self, checkpoint: Checkpoint) -> None:
        state = checkpoint.state
        _load_engines(self._engines, checkpoint)
        self.step = self._saved_step = checkpoint.step
        self.results = dict(state["results"])
        self._seconds = float(state["seconds"])
        best = self._best
        best.value, best.step, best.waits, self._is_over = state["best"]
        if self._trainer is not None:
            self._trainer.load_state_dict(state["trainer"])
        self._context.console.say(f"{self.phase}: continues after step {self.step}")


def _is_due(config: CheckpointConfig, saved_step: int, step: int, minutes: float) -> bool:
    """Return True if a checkpoint is due by checkpoint.every_steps or every_minutes."""
    every = config.every_steps
    by_steps = every is not None and step // every > saved_step // every
    return by_steps or (config.every_minutes is not None and minutes >= config.every_minutes)


def _load_engines(engines: Mapping[str, StatefulWithTensors], checkpoint: Checkpoint) -> None:
    for name, engine in engines.items():
        engine.training_state.load(checkpoint.build_tensor_reader(name))
        engine.load_state_dict(checkpoint.state["engines"][name])


def _export_advice(phase_dir: Path) -> str:
    """Return words for a message: how to export a phase's last checkpoint, if there is one."""
    last_folder = next(iter(checkpoint_folders(phase_dir)), None)
    if last_folder is None:
        return "there is no checkpoint from before these steps"
    step = int(last_folder.name.rpartition("-")[2])
    words = f"{phase_dir.parent} --phase {phase_dir.name} --checkpoint {step}"
    return f"python -m rlhf.export {words} exports the last checkpoint"


def _remove_old_checkpoints(phase_dir: Path, keep: int, *, best: int | None) -> None:
    """Remove all checkpoints except the latest ``keep`` and the checkpoint of step ``best``."""
    kept = None if best is None else checkpoint_folder(phase_dir, best)
    for folder in checkpoint_folders(phase_dir)[keep:]:
        if folder != kept:
            shutil.rmtree(folder)
