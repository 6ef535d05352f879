"""Trackers: writers of the metrics and samples of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhf.config.choices import WandbMode
from rlhf.config.schema.run import RunConfig
from rlhf.tracking.jsonl import JsonlWriter
from rlhf.tracking.registry import check_name

if TYPE_CHECKING:
    # Type checking only: importing rlhf.types would import torch.
    from rlhf.types import Tracker


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


def build_tracker(config: RunConfig, run_dir: Path, *, is_main: bool) -> Tracker:
    """Return the tracker of this rank; only the main rank records metrics.

    Raises:
        CapabilityError: if Weights & Biases or TensorBoard is configured but not available.
    """
    if not is_main:
        return NullTracker()
    trackers: list[Tracker] = [JsonlTracker(run_dir / "metrics.jsonl")]
    if config.tracking.wandb is not WandbMode.disabled:
        from rlhf.tracking.wandb_run import WandbTracker

        name = run_dir.resolve().name
        wandb = WandbTracker(config.tracking, run_dir, asdict(config), name=name, group=config.name)
        trackers.append(wandb)
    if config.tracking.tensorboard:
        from rlhf.tracking.tensorboard import TensorBoardTracker

        trackers.append(TensorBoardTracker(run_dir / "tensorboard"))
    return Trackers(trackers)
