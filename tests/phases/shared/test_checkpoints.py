"""Steps of a phase whose drive refuses a checkpoint for a while."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import safetensors.torch
import torch
from omegaconf import DictConfig
from safetensors import SafetensorError
from torch import Tensor

from rlhf import atomic
from rlhf.checkpoint import phase_state
from rlhf.checkpoint.phase_state import SkippedError, checkpoints
from rlhf.config.choices import Phase
from rlhf.config.freeze import to_run_config
from rlhf.phases.shared.checkpoints import Checkpoints
from rlhf.phases.shared.pulse import Pulse
from rlhf.phases.shared.stop_requests import StopRequests
from rlhf.types import Ranks


@dataclass
class Model:
    """An engine whose state is three tensors that all ranks must send."""

    sent: list[str] = field(default_factory=list)
    numbers: dict[str, Any] = field(default_factory=dict)
    bytes: int = 1

    @property
    def training_state(self) -> Model:
        return self

    def stream(self) -> Iterator[tuple[str, Tensor]]:
        for name in "abc":
            self.sent.append(name)
            yield name, torch.ones(3)


class Run:
    """A phase of four steps with a checkpoint after each; the drive refuses those in ``outage``."""

    def __init__(self, config: Any, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.model, self.said, self.outage = Model(), list[str](), {2, 3}
        context: Any = SimpleNamespace(
            config=config,
            run_dir=folder,
            ranks=Ranks(),
            console=SimpleNamespace(say=self.said.append),
            requests=StopRequests(),
            pulse=Pulse(),
            phase_started=0.0,
            resumes={},
            tracker=SimpleNamespace(log=lambda *_: None),
        )
        engines: Any = {"model": self.model}
        self.phase = Checkpoints(context, Phase.sft, engines)
        save_file = safetensors.torch.save_file

        def save(*arguments: Any, **options: Any) -> None:
            if self.phase.step in self.outage:
                raise SafetensorError("I/O error: Stale file handle (os error 116)")
            save_file(*arguments, **options)

        monkeypatch.setattr(safetensors.torch, "save_file", save)
        monkeypatch.setattr(phase_state, "SHARD_BYTES", 1)  # each tensor gets its own file
        monkeypatch.setattr(atomic.time, "sleep", lambda _: None)


@pytest.fixture
def run(
    compose: Callable[[list[str]], DictConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Run:
    keys = ["checkpoint.every_steps=1", "checkpoint.keep=9"]
    keys += ["checkpoint.best=sft/eval_loss", "sft.eval_every=1"]
    return Run(to_run_config(compose(keys)), tmp_path, monkeypatch)


def kept(folder: Path) -> list[str]:
    return [path.name.lstrip("step-0") for path in reversed(checkpoints(folder / "sft"))]


def test_refused_checkpoints_are_skipped_with_a_warning(run: Run, tmp_path: Path) -> None:
    assert list(run.phase.steps(4)) == [1, 2, 3, 4]
    assert kept(tmp_path) == ["1", "4"]
    warnings = [line.partition(":")[0] for line in run.said]
    assert warnings == ["warning"] * 2
    assert run.model.sent == list("abc") * 4, "other ranks send everything, also what is skipped"


def test_the_best_checkpoint_is_not_skipped(run: Run, tmp_path: Path) -> None:
    losses = ({"sft/eval_loss": 1 / step} for step in run.phase.steps(4))
    with pytest.raises(SkippedError, match="step-00000002: the checkpoint is skipped"):
        deque(map(run.phase.evaluated, losses))
    assert kept(tmp_path) == ["1"]
