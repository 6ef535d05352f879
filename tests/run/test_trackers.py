"""The fan-out, and what each rank builds."""

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any

import pytest

from rlhf.base.errors import CapabilityError, ConfigError
from rlhf.config.choices import Dtype, WandbMode
from rlhf.config.schema.run import AlarmsConfig, RunConfig, TrackingConfig
from rlhf.options import Backend
from rlhf.run.step_alarms import Alarm, AlarmName
from rlhf.run.tracker import Sample, Token, Tracker
from rlhf.run.trackers import FileTracker, IsolatedTracker, Trackers, build_tracker

NO_ALARMS = AlarmsConfig(stop=[], mute=[])
TOKENS = [Token(" r", 0.25, -1.23456, 0.5004, 0.75)]
SAMPLE = Sample("p", "r", ended=True, score=0.5, kl=0.25, tokens=TOKENS)


class Notes(Tracker):
    """A tracker that remembers."""

    def __init__(self, *_: object) -> None:
        self.taken: list[tuple[str, int, dict[str, float]] | str] = []

    def log(self, phase: str, step: int, values: Mapping[str, float]) -> None:
        self.taken.append((phase, step, dict(values)))

    def finish(self) -> None:
        self.taken.append("finished")

    def samples(self, phase: str, step: int, samples: Sequence[Sample], *, steps: int) -> None:
        raise OSError("no space left")


def run_config(
    wandb: WandbMode, *, tensorboard: bool = False, others: Sequence[str] = ()
) -> RunConfig:
    """A run config of which only what trackers read is filled in."""
    tracking = TrackingConfig(
        wandb=wandb,
        project="p",
        entity=None,
        tags=[],
        upload=False,
        tensorboard=tensorboard,
        others=list(others),
        timeout_seconds=20.0,
        show_config=False,
        log_every=1,
    )
    rest: dict[str, Any] = {field.name: None for field in fields(RunConfig)}
    settings: Any = SimpleNamespace(dtype="bf16", backend="fast")
    rest |= {"hardware": settings, "rollout": settings, "tracking": tracking, "alarms": NO_ALARMS}
    return RunConfig(**rest | {"name": "default", "ppo": SimpleNamespace(steps=10)})


def test_an_undocumented_metric_is_logged_and_named_once() -> None:
    """For example of a loss that a user has changed: the run goes on."""
    first, second, said = Notes(), Notes(), list[str]()
    trackers = Trackers([first, second], NO_ALARMS, said.append, {})
    values = {"sft/grad_norm": 1.0, "sft/los": 1.0}
    for step in (1, 2):
        trackers.log("sft", step, values)
    trackers.finish()
    taken = [("sft", 1, values), ("sft", 2, values), "finished"]
    assert first.taken == second.taken == taken
    assert len(said) == 1
    assert said[0].startswith("warning: sft/los is in no metrics.yaml; the nearest documented")


def test_a_sample_line_holds_gold_only_if_it_is_known(tmp_path: Path) -> None:
    tracker = FileTracker(tmp_path, [].append)
    parts = {"gold": 0.0, "exact": 0.0, "polite": 0.5}
    tracker.samples("ppo", 1, [SAMPLE, SAMPLE._replace(gold_parts=parts)], steps=5)
    tracker.finish()
    lines = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
    plain = {"phase": "ppo", "step": 1, "prompt": "p", "response": "r", "ended": True}
    plain |= {"score": 0.5, "kl": 0.25}
    plain |= {"token_texts": [" r"], "token_kl": [0.25], "token_values": [-1.235]}
    plain |= {"token_advantages": [0.5], "token_rewards": [0.75], "model": "actor"}
    assert lines == [plain, plain | {"gold": 0.0, "gold_parts": {"exact": 0.0, "polite": 0.5}}]


def test_a_sample_line_has_no_number_that_was_not_computed(tmp_path: Path) -> None:
    tracker = FileTracker(tmp_path, [].append)
    bare = SAMPLE._replace(tokens=[Token(" r", 0.25)], weights_step=2)
    tracker.samples("ppo", 6, [bare], steps=6)
    tracker.finish()
    line = json.loads((tmp_path / "samples.jsonl").read_text())
    assert [key for key in line if key.startswith("token_")] == ["token_texts", "token_kl"]
    assert (line["step"], line["weights_step"]) == (6, 2)


def test_each_row_of_a_log_is_a_line(tmp_path: Path) -> None:
    rows = [{"prompt": "a", "score": 0.5}, {"prompt": "b", "score": 0.25}]
    tracker = FileTracker(tmp_path, [].append)
    trackers = Trackers([tracker], NO_ALARMS, [].append, {})
    trackers.append("rollouts.jsonl", "ppo", 8, rows)
    tracker.finish()
    lines = [json.loads(line) for line in (tmp_path / "rollouts.jsonl").read_text().splitlines()]
    assert lines == [{"phase": "ppo", "step": 8, **row} for row in rows]


def test_a_tracker_that_fails_once_is_left_alone() -> None:
    notes, said = Notes(), []
    isolated = IsolatedTracker(lambda: notes, 20)
    tracker = Trackers([], NO_ALARMS, said.append, {"Notes": isolated})
    tracker.log("sft", 1, {})
    for step in (1, 2):
        tracker.samples("sft", step, [SAMPLE], steps=2)
    tracker.log("sft", 2, {})
    tracker.finish()
    assert notes.taken == [("sft", 1, {})]
    (warning,) = said
    assert warning.startswith("warning: Notes failed (OSError: no space left). The run continues")


class Stuck(Notes):
    """A tracker that hangs in step 2, or at a later call as ``hangs_in`` says."""

    hangs_in = "log"

    def log(self, phase: str, step: int, values: Mapping[str, float]) -> None:
        super().log(phase, step, values)
        if step == 2 and self.hangs_in == "log":
            Event().wait()

    def alert(self, _: Alarm) -> None:
        sys.exit("a tracker may raise anything")

    def finish(self) -> None:
        if self.hangs_in == "finish":
            Event().wait()


@pytest.mark.parametrize("hangs_in", ["log", "finish"])
def test_a_tracker_that_hangs_is_left_alone(
    hangs_in: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Stuck, "hangs_in", hangs_in)
    config = run_config(WandbMode.disabled, others=[f"{__name__}:Stuck"])
    config.tracking.timeout_seconds = 0.1
    said: list[str] = []
    tracker = build_tracker(config, tmp_path, is_main=True, say=said.append)
    for step in (1, 2, 3):
        tracker.log("sft", step, {"sft/loss": 1.0})
    tracker.finish()
    (warning,) = said
    seconds = {"log": "0.1", "finish": "1"}[hangs_in]
    reason = f"(TimeoutError: tracking.timeout_seconds: no answer in {seconds} s)"
    assert f"{__name__}:Stuck failed {reason}. The run continues without it" in warning
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 3


def test_a_tracker_that_exits_does_not_end_the_run() -> None:
    said: list[str] = []
    tracker = Trackers([], NO_ALARMS, said.append, {"Stuck": IsolatedTracker(Stuck, 20)})
    tracker.alert(Alarm("ppo", 4, AlarmName.no_change, "ppo/kl", 9.0, "Raise ppo.kl_ctl."))
    assert "Stuck failed (SystemExit: a tracker may raise anything)" in said[-1]


class Unreachable(Tracker):
    """A tracker whose server does not answer."""

    def __init__(self, *_: object) -> None:
        raise ConnectionError("no server")


class Repeating(Notes):
    """A tracker that remembers samples, and skips what it has."""

    skips_repeats = True

    def samples(self, phase: str, step: int, samples: Sequence[Sample], *, steps: int) -> None:
        self.shown = [(phase, step, steps, samples)]


def test_samples_are_sent_again_as_they_were(tmp_path: Path) -> None:
    parts, gold = {"gold": 0.5, "exact": 1.0}, SAMPLE._replace(tokens=[])
    sent = [gold._replace(gold_parts=parts), gold._replace(model="actor_ema", score=1.5)]
    files, notes = FileTracker(tmp_path, [].append), Repeating()
    files.samples("ppo", 4, sent, steps=10)
    files.finish()
    again = {"Notes": IsolatedTracker(lambda: notes, 20)}
    Trackers([], NO_ALARMS, [].append, again).repeat_logs(tmp_path, 10)
    assert notes.shown == [("ppo", 4, 10, sent)]


def test_a_tracker_that_does_not_start_is_refused(tmp_path: Path) -> None:
    config = run_config(WandbMode.disabled, others=[f"{__name__}:Unreachable"])
    with pytest.raises(CapabilityError, match=r"Unreachable does not start \(no server"):
        build_tracker(config, tmp_path, is_main=True, say=[].append)


def test_a_tracker_of_the_user_is_imported(tmp_path: Path) -> None:
    path = f"{__name__}:Notes"
    config = run_config(WandbMode.disabled, others=[path])
    said: list[str] = []
    tracker = build_tracker(config, tmp_path, is_main=True, say=said.append)
    tracker.samples("ppo", 1, [SAMPLE], steps=2)
    tracker.finish()
    assert said[0].startswith(f"warning: {path} failed")
    for wrong in ("nowhere:Notes", f"{__name__}:None_", "word"):
        config = run_config(WandbMode.disabled, others=[wrong])
        with pytest.raises(ConfigError, match=rf"tracking\.others={wrong}: .*package\.module:NAME"):
            build_tracker(config, tmp_path, is_main=True, say=said.append)


@pytest.mark.parametrize(
    ("dtype", "backend", "alarms"),
    [("fp32", "fast", 1), ("bf16", "fast", 0), ("fp32", "vllm_server", 0)],
)
def test_the_limit_of_the_mismatch_depends_on_the_precision(
    tmp_path: Path, dtype: str, backend: str, alarms: int
) -> None:
    said: list[str] = []
    config = run_config(WandbMode.disabled)
    config.hardware.dtype, config.rollout.backend = Dtype(dtype), Backend(backend)
    tracker = build_tracker(config, tmp_path, is_main=True, say=said.append)
    tracker.log("ppo", 1, {"ppo/logprob_mismatch": 0.02})
    tracker.finish()
    assert ["rollout_mismatch" in line for line in said] == [True] * alarms


def test_the_other_ranks_write_nothing(tmp_path: Path) -> None:
    config = run_config(WandbMode.online, tensorboard=True)
    tracker = build_tracker(config, tmp_path, is_main=False, say=[].append)
    assert type(tracker) is Tracker
    tracker.log("sft", 1, {"sft/loss": 1.0})
    tracker.finish()
    assert list(tmp_path.iterdir()) == []


def test_importing_the_package_imports_nothing_heavy() -> None:
    modules = "console jsonl metric_table tracker trackers wandb_run".split()
    paths = ["report.at_end", "report.summary", *(f"run.{module}" for module in modules)]
    imports = "; ".join(f"import rlhf.{path}" for path in paths)
    heavy = {"jinja2", "rich", "wandb", "torch", "tensorboard"}
    code = f"import sys; {imports}; print({heavy} & set(sys.modules))"
    command = [sys.executable, "-c", code]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "set()\n"
