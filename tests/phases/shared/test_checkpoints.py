"""Steps of a phase whose drive refuses a checkpoint for a while."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rlhf.base.errors import CheckpointError, RlhfError
from rlhf.base.heartbeat import Heartbeat
from rlhf.base.ranks import Ranks
from rlhf.base.types import TensorSlice
from rlhf.config.choices import Phase
from rlhf.config.freeze import to_run_config
from rlhf.config.schema.run import AlarmName
from rlhf.phases.shared.checkpoints import Checkpoints
from rlhf.phases.shared.step_signals import StopRequests
from rlhf.run import phase_state
from rlhf.run.phase_state import Checkpoint, SkippedError, checkpoint_folders
from rlhf.run.step_alarms import Alarm
from rlhf.run.trackers import StoppedByAlarmError
from tests.conftest import Compose
from tests.run.test_phase_state import let_fail


@dataclass
class Model:
    """An engine whose state is three tensors."""

    total_bytes: int = 1

    @property
    def training_state(self) -> Model:
        return self

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load(self, _: Any) -> None: ...

    def load_state_dict(self, _: Any) -> None: ...

    def stream(self) -> Iterator[TensorSlice]:
        return ((name, 0, torch.ones(3)) for name in "abc")


class Run:
    """A phase of four steps with a checkpoint after each; the drive refuses those in ``outage``."""

    def __init__(
        self, config: Any, folder: Path, monkeypatch: pytest.MonkeyPatch, **more: Any
    ) -> None:
        self.model, self.said, self.outage = Model(), list[str](), {2, 3}
        context: Any = SimpleNamespace(
            config=config,
            run_dir=folder,
            ranks=Ranks(),
            console=SimpleNamespace(say=self.said.append),
            requests=StopRequests(),
            heartbeat=Heartbeat(),
            phase_started=0.0,
            tracker=SimpleNamespace(log=lambda *_: None, append=lambda *_: None),
            **{"resumes": {}} | more,
        )
        engines: Any = {"model": self.model}
        self.phase = Checkpoints(context, Phase.sft, engines)
        stale = "Stale file handle (os error 116)"
        let_fail(monkeypatch, lambda _: stale if self.phase.step in self.outage else None)
        monkeypatch.setattr(phase_state, "SHARD_BYTES", 1)  # each tensor gets its own file

    def steady(self, **checkpoint: Any) -> Checkpoints:
        """The phase on a drive that refuses nothing, with checkpoints when they are asked for."""
        self.outage = set()
        self.phase._config = replace(self.phase._config, **{"every_steps": None} | checkpoint)
        return self.phase


@pytest.fixture
def run(compose: Compose, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    keys = ["checkpoint.every_steps=1", "checkpoint.keep=9"]
    keys += ["checkpoint.best=sft/eval_loss", "sft.eval_every=1"]
    return Run(to_run_config(compose(keys)), tmp_path, monkeypatch)


def kept(folder: Path) -> list[str]:
    return [path.name.lstrip("step-0") for path in reversed(checkpoint_folders(folder / "sft"))]


def test_refused_checkpoints_are_skipped_with_a_warning(run: Run, tmp_path: Path) -> None:
    assert list(run.phase.steps(4)) == [1, 2, 3, 4]
    assert kept(tmp_path) == ["1", "4"]
    warnings = [line.partition(":")[0] for line in run.said]
    assert warnings == ["warning"] * 2


@pytest.mark.parametrize("part", ["engines", "results", "seconds", "best"])
def test_a_state_of_another_form_is_refused(
    part: str, compose: Compose, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = to_run_config(compose([]))
    whole = {
        "step": 3,
        "engines": {"model": {}},
        "results": {},
        "seconds": 1.0,
        "best": [None, None, 0, 0],
    }
    monkeypatch.setattr(Checkpoint, "build_tensor_reader", lambda *_: None)
    Run(config, tmp_path, monkeypatch, resumes={Phase.sft: Checkpoint(tmp_path, 3, whole)})
    found = Checkpoint(tmp_path, 3, whole | {part: None})
    with pytest.raises(CheckpointError, match=r"state\.json is not the state of this phase"):
        Run(config, tmp_path, monkeypatch, resumes={Phase.sft: found})


def test_the_best_checkpoint_is_not_skipped(run: Run, tmp_path: Path) -> None:
    losses = ({"sft/eval_loss": 1 / step} for step in run.phase.steps(4))
    with pytest.raises(SkippedError, match="step-00000002: the checkpoint is skipped"):
        deque(map(run.phase.log_evaluation, losses))
    assert kept(tmp_path) == ["1"]


@pytest.mark.parametrize(
    ("name", "steps"), [(AlarmName.length, ["1", "2"]), (AlarmName.not_finite, ["1"])]
)
def test_an_alarm_ends_the_run_with_a_checkpoint_of_its_step(
    run: Run, tmp_path: Path, name: AlarmName, steps: list[str]
) -> None:
    """Weights that are not finite are not kept."""
    phase = run.steady()
    alarm = Alarm("sft", 2, name, "sft/loss", 1.0, "Lower it.")

    def log(_: str, step: int, values: Any) -> None:
        if step == alarm.step:
            raise StoppedByAlarmError(alarm)

    phase._context.tracker.log = log  # type: ignore[method-assign]

    def take(step: int) -> None:
        phase.log_step({"sft/skipped_steps": 0.0})
        phase._context.requests.wants_checkpoint = step == 1

    with pytest.raises(StoppedByAlarmError, match=f"alarms.stop has {name}"):
        deque(map(take, phase.steps(4)))
    assert phase.step == len(steps)
    assert kept(tmp_path) == steps


@pytest.mark.parametrize(
    ("at", "name", "steps"),
    [
        (0, AlarmName.score_against_gold, ["1"]),
        (4, AlarmName.score_against_gold, None),
        (4, AlarmName.not_finite, []),
    ],
)
def test_an_alarm_of_the_first_or_the_final_evaluation_loses_no_model(
    run: Run, tmp_path: Path, at: int, name: AlarmName, steps: list[str] | None
) -> None:
    """After the last step the phase goes on to save its models; resume would only repeat it."""
    phase = run.steady()

    def log(_: str, step: int, values: Any) -> None:
        if step == at and "sft/eval_loss" in values:
            raise StoppedByAlarmError(Alarm("sft", at, name, "sft/eval_loss", 1.0, "Lower it."))

    phase._context.tracker.log = log  # type: ignore[method-assign]

    def train() -> None:
        phase.log_held_out({"sft/eval_loss": 1.0})
        for _ in phase.steps(4):
            phase.log_step({"sft/skipped_steps": 0.0})
        phase.log_held_out({"sft/eval_loss": 1.0})

    if steps is None:
        train()
    else:
        with pytest.raises(StoppedByAlarmError):
            train()
        assert kept(tmp_path) == steps


def test_the_result_names_the_step_of_the_models(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Model, "load_state_dict", lambda *_: None, raising=False)
    monkeypatch.setattr(Model, "load", lambda *_: None, raising=False)
    assert run.steady().totals().keys() == {"steps", "seconds"}
    phase = run.steady()
    phase.loads_best = True
    steps_of(run, {1: 3.0, 2: 1.5, 3: 2.0}, every=1, total=3)
    assert run.said == ["sft: ends with the models of step 2"]
    assert phase.totals() | {"seconds": 0} == {
        "steps": 3,
        "seconds": 0,
        "best_step": 2,
        "best_value": 1.5,
    }
    assert phase.models_step == 2
    phase.loads_best = False  # the best is only kept
    assert phase.totals().keys() == {"steps", "seconds"}
    assert phase.models_step == 3


def test_the_latest_run_is_the_one_that_has_taken_a_step(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    pointed: list[int] = []
    name = "rlhf.phases.shared.checkpoints.point_latest_to"
    monkeypatch.setattr(name, lambda *_: pointed.append(run.phase.step))
    deque(run.steady().steps(3))
    assert pointed == [1]


def steps_of(run: Run, losses: dict[int, float], *, every: int, total: int) -> list[int]:
    """Take steps, evaluated when they ask for it; return the evaluated ones."""
    evaluated = []
    for step in run.phase.steps(total):
        run.phase.log_step({"sft/skipped_steps": 0.0})
        if run.phase.is_evaluation_due(every):
            evaluated.append(step)
            run.phase.log_evaluation({"sft/eval_loss": losses[step]})
    return evaluated


@pytest.mark.parametrize(("loads_best", "evaluated"), [(True, [50, 95]), (False, [50])])
def test_the_last_step_is_a_candidate_if_the_best_is_loaded(
    run: Run, *, loads_best: bool, evaluated: list[int]
) -> None:
    run.steady().loads_best = loads_best
    assert steps_of(run, {50: 2.0, 95: 1.0}, every=50, total=95) == evaluated
    assert not [line for line in run.said if "ends with the models" in line]


def test_a_phase_that_ends_early_evaluates_the_step_that_it_ends_at(run: Run) -> None:
    run.steady().loads_best = True
    seen = []
    for step in run.phase.steps(9):
        if step == 3:
            run.phase.end_after_this_step("it is far from its reference")
        if run.phase.is_evaluation_due(5):
            seen.append(step)
            run.phase.log_evaluation({"sft/eval_loss": 1.0})
    assert seen == [3]


def test_a_loss_that_is_not_a_number_is_never_the_best(run: Run) -> None:
    run.steady()._best.patience = 2
    losses = {1: math.nan, 2: 3.0, 3: math.nan, 4: 2.0, 5: math.nan, 6: math.nan, 7: math.nan}
    assert steps_of(run, losses, every=1, total=9) == [1, 2, 3, 4, 5, 6]
    assert run.said == ["sft: ends after step 6: sft/eval_loss was best after step 4 (2)"]


def test_evaluations_of_a_frozen_policy_exhaust_no_patience(run: Run) -> None:
    run.steady()._best.patience = 2
    for step in run.phase.steps(9):
        run.phase.log_evaluation({"sft/eval_loss": 1.0}, is_frozen=step <= 5)
    assert run.said == ["sft: ends after step 7: sft/eval_loss was best after step 1 (1)"]


def test_patience_ends_a_phase_whose_loss_never_was_a_number(run: Run) -> None:
    run.steady()._best.patience = 2
    assert steps_of(run, dict.fromkeys(range(9), math.nan), every=1, total=9) == [1, 2]
    assert run.said == ["sft: ends after step 2: sft/eval_loss was never a number"]


def test_a_checkpoint_that_was_due_at_a_skipped_step_is_written_after_it(
    run: Run, tmp_path: Path
) -> None:
    for step in run.steady(every_steps=10).steps(40):
        run.phase.log_step({"sft/skipped_steps": float(step in {10, 20, 21, 30})})
    assert kept(tmp_path) == ["11", "22", "31", "40"]


def test_steps_with_one_of_many_updates_skipped_do_not_end_the_phase(
    run: Run, tmp_path: Path
) -> None:
    for _ in run.steady(every_steps=10, most_skipped=3).steps(20):
        run.phase.log_step({"sft/skipped_steps": 1.0}, optimizer_steps=16)
    assert len(checkpoint_folders(tmp_path / "sft")) == 2
    for _ in range(2):
        run.phase.log_step({"sft/skipped_steps": 16.0}, optimizer_steps=16)
    with pytest.raises(RlhfError, match="no optimizer step could be taken in 3 steps in a row"):
        run.phase.log_step({"sft/skipped_steps": 16.0}, optimizer_steps=16)
