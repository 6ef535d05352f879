"""Trackers: writers of the metrics and samples of a run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhf.config.choices import WandbMode
from rlhf.config.schema.run import AlarmsConfig, RunConfig
from rlhf.config.sweep_command import SWEEPS
from rlhf.errors import RlhfError
from rlhf.tracking.jsonl import JsonlWriter
from rlhf.tracking.registry import check_name
from rlhf.tracking.step_alarms import Alarm, AlarmRules

if TYPE_CHECKING:
    # Type checking only: importing rlhf.types would import torch.
    from rlhf.types import Tracker


class StoppedByAlarmError(RlhfError):
    """An alarm in alarms.stop ended the run."""


class Trackers:
    """A tracker that forwards metrics to several trackers."""

    def __init__(self, trackers: Sequence[Tracker]) -> None:
        self._trackers = trackers

    def log(self, phase: str, step: int, values: Mapping[str, float]) -> None:
        """Record the metrics of one step.

        Raises:
            KeyError: if a metric is not documented.
        """
        for name in values:
            check_name(name)
        for tracker in self._trackers:
            tracker.log(phase, step, values)

    def finish(self) -> None:
        """Flush and close all trackers."""
        for tracker in self._trackers:
            tracker.finish()


class AlarmTracker:
    """A tracker that raises alarms: in alarms.jsonl, on the terminal, and to those who listen."""

    def __init__(
        self,
        path: Path,
        config: AlarmsConfig,
        *,
        say: Callable[[str], None],
        listeners: Sequence[Callable[[Alarm], None]] = (),
    ) -> None:
        self._path = path
        self._rules = AlarmRules(config.mute)
        self._stop = config.stop
        self._say = say
        self._listeners = listeners

    def log(self, phase: str, step: int, values: Mapping[str, float]) -> None:
        """Raise the alarms of one step.

        Raises:
            StoppedByAlarmError: if alarms.stop has one of them.
        """
        for alarm in self._rules.check(phase, step, values):
            writer = JsonlWriter(self._path)
            writer.write(alarm._asdict())
            writer.close()
            self._say(alarm.line)
            for listener in self._listeners:
                listener(alarm)
            if alarm.name in self._stop:
                raise StoppedByAlarmError(
                    f"{alarm.line} The run ends because alarms.stop has {alarm.name}"
                )

    def finish(self) -> None:
        """Do nothing: the file is closed after every alarm."""


class NullTracker:
    """A tracker that records nothing, for every rank except rank 0."""

    def log(self, phase: str, step: int, values: Mapping[str, float]) -> None:
        """Record nothing."""

    def finish(self) -> None:
        """Do nothing."""


class JsonlTracker:
    """A tracker that writes metrics to a file, one line per step and phase."""

    def __init__(self, path: Path) -> None:
        self._writer = JsonlWriter(path)

    def log(self, phase: str, step: int, values: Mapping[str, float]) -> None:
        """Append the metrics of one step."""
        self._writer.write({"phase": phase, "step": step, **values})

    def finish(self) -> None:
        """Close the file."""
        self._writer.close()


class SampleWriter:
    """A writer of sampled responses to a file, one line per response."""

    def __init__(self, path: Path) -> None:
        self._writer = JsonlWriter(path)

    def write(
        self,
        *,
        phase: str,
        step: int,
        prompt: str,
        response: str,
        ended: bool,
        score: float,
        gold_parts: Mapping[str, float] | None = None,
    ) -> None:
        """Append one response; ``gold_parts`` are the ratings of a judge, if there is one."""
        sample: dict[str, Any] = {"phase": phase, "step": step, "prompt": prompt}
        sample |= {"response": response, "ended": ended, "score": score}
        if gold_parts is not None:
            parts = dict(gold_parts)
            sample |= {"gold": parts.pop("gold"), "gold_parts": parts}
        self._writer.write(sample)

    def close(self) -> None:
        """Close the file."""
        self._writer.close()


def build_tracker(
    config: RunConfig, run_dir: Path, *, is_main: bool, say: Callable[[str], None]
) -> Tracker:
    """Return the tracker of this rank; only the main rank records metrics.

    ``say`` prints the line of an alarm.

    Raises:
        CapabilityError: if Weights & Biases or TensorBoard is configured but not available.
    """
    if not is_main:
        return NullTracker()
    trackers: list[Tracker] = [JsonlTracker(run_dir / "metrics.jsonl")]
    listeners = []
    if config.tracking.wandb is not WandbMode.disabled:
        from rlhf.tracking.wandb_run import WandbTracker

        place = run_dir.resolve()
        is_job = place.parents[1].name == SWEEPS.name  # runs/sweeps/SWEEP/JOB
        wandb = WandbTracker(
            config.tracking,
            run_dir,
            asdict(config),
            name=place.name,
            group=place.parent.name if is_job else config.name,
            job_type="+".join(config.phase.order),
        )
        trackers.append(wandb)
        listeners.append(wandb.alert)
    if config.tracking.tensorboard:
        from rlhf.tracking.tensorboard import TensorBoardTracker

        trackers.append(TensorBoardTracker(run_dir / "tensorboard"))
    alarms = run_dir / "alarms.jsonl"
    trackers.append(AlarmTracker(alarms, config.alarms, say=say, listeners=listeners))
    return Trackers(trackers)
