"""Runs in TensorBoard, MLflow and Trackio, read back by their own clients."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from rlhf.base.errors import CapabilityError
from rlhf.run.metric_table import PANEL_TABLE
from rlhf.run.step_alarms import Alarm, AlarmName
from rlhf.run.tracker import Sample, Tracker
from rlhf.run.trackers import TensorBoardTracker, build_tracker
from tests.plan.planned import Compose, run_of

SAMPLE = Sample("2+2?", " *4*", True, 0.5, 0.25, [])
ALARM = Alarm("ppo", 4, AlarmName.no_change, "ppo/kl", 9.0, "Raise ppo.kl_ctl.")
# TensorBoard's protocol buffers are written in C, in the older way.
OLD_PROTOCOL = pytest.mark.filterwarnings("ignore::DeprecationWarning")
KL = [(step, step / 8) for step in range(1, 9)]


@pytest.fixture
def mlflow_uri(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    uri = (tmp_path / "mlruns").as_uri()
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # a database takes seconds to make
    return uri


@pytest.fixture
def trackio_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    from trackio import sqlite_storage

    monkeypatch.setattr(sqlite_storage, "TRACKIO_DIR", tmp_path / "trackio")
    return tmp_path / "trackio"


def record_twice(compose: Compose, tracking: str, run_dir: Path) -> list[str]:
    """Record a run that is stopped thrice; return what it said.

    The second attempt repeats steps. The third is killed, and the tracker loses its steps.
    """
    run_dir.mkdir(parents=True)
    said: list[str] = []
    for steps in ((1, 2, 3, 4), (3, 4, 5), (6, 7), (8,)):
        kept = "local" if 6 in steps else tracking
        config = run_of(compose, f"tracking={kept}", "tracking.tags=[a]", "ppo.kl_ctl=0.25")
        tracker = build_tracker(config, run_dir, is_main=True, say=said.append)
        record(tracker, steps, is_last=8 in steps)
    return said


def record(tracker: Tracker, steps: Sequence[int], *, is_last: bool) -> None:
    tracker.log("sft", 9, {"sft/loss": 2.5})
    for step in steps:
        tracker.log("ppo", step, {"ppo/kl": step / 8})
        if step in (4, 7):
            tracker.samples("ppo", step, [SAMPLE], steps=8)
        if step == 4:
            tracker.alert(ALARM)
    if is_last:
        tracker.conclude({"objective": 0.75, "phases": {}})
    tracker.finish()


def events_in(folder: Path) -> Any:
    """What is in the event files of a folder."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    sizes = {"histograms": 0, "scalars": 0, "tensors": 0}  # all of them
    return EventAccumulator(str(folder), sizes).Reload()


@OLD_PROTOCOL
def test_tensorboard_has_each_step_once(compose: Compose, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    assert not [line for line in record_twice(compose, "tensorboard", run_dir) if "failed" in line]
    events = events_in(run_dir / "tensorboard")
    steps = {
        name: [(event.step, event.value) for event in events.Scalars(name)]
        for name in events.Tags()["scalars"]
    }
    own = {"objective": steps["objective"]}
    assert steps == {"sft/loss": [(9, 2.5)], "ppo/kl": KL, **own}, "the same names as everywhere"
    assert [value for _, value in steps["objective"]] == [0.75]
    texts = events.Tensors("ppo/samples/text_summary")
    shown = b"actor, score 0.50, KL 0.25\n\n    2+2? *4*"
    assert [(text.step, *text.tensor_proto.string_val) for text in texts] == [
        (4, shown),
        (7, shown),
    ]
    metadata = events.SummaryMetadata("_hparams_/session_start_info").plugin_data.content
    assert all(word in metadata for word in (b"seed", b"ppo.kl_ctl", b"None"))


@OLD_PROTOCOL
def test_numbers_of_an_options_log_are_histograms_and_not_repeated(tmp_path: Path) -> None:
    lines: list[dict[str, Any]] = [{"score": 0.5, "text": "a", "kl": None}, {"score": 1.5, "n": 1}]
    for steps in ((1, 2), (2, 3)):  # the second run repeats step 2
        tracker = TensorBoardTracker(tmp_path, {})
        for step in steps:
            tracker.append("rollouts.jsonl", "ppo", step, lines)
        tracker.finish()
    events = events_in(tmp_path)
    assert events.Tags()["histograms"] == ["ppo/histograms/rollouts/score"]
    layout = events.SummaryMetadata("custom_scalars__config__").plugin_data.plugin_name
    assert layout == "custom_scalars"
    (stored,) = events.Tensors("custom_scalars__config__")[-1].tensor_proto.string_val
    titles = [title.encode() for title in PANEL_TABLE["PPO"]]
    assert sorted(titles, key=stored.index) == titles, "the order of the report"
    found = events.Histograms("ppo/histograms/rollouts/score")
    assert [event.step for event in found] == [1, 2, 3]
    value = found[0].histogram_value
    assert (value.num, value.min, value.max) == (2, 0.5, 1.5)


@OLD_PROTOCOL
def test_tensorboard_has_each_step_once_though_the_clock_was_set_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = time.time
    for jump, steps in ((0, (1, 2, 3, 4)), (-3600, (3, 4, 5, 6)), (-1800, (5, 6, 7))):
        monkeypatch.setattr(time, "time", lambda jump=jump: now() + jump)
        tracker = TensorBoardTracker(tmp_path, {})
        for step in steps:
            tracker.log("ppo", step, {"ppo/kl": step / 8})
        tracker.finish()
    assert sorted(event.step for event in events_in(tmp_path).Scalars("ppo/kl")) == [*range(1, 8)]


@pytest.mark.usefixtures("mlflow_uri")
def test_mlflow_has_one_run_with_each_step_once(compose: Compose, tmp_path: Path) -> None:
    from mlflow.tracking import MlflowClient

    run_dir = tmp_path / "runs" / "one"
    assert not [line for line in record_twice(compose, "mlflow", run_dir) if "failed" in line]
    client = MlflowClient()
    experiment = client.get_experiment_by_name("rlhf")
    assert experiment is not None
    (run,) = client.search_runs([experiment.experiment_id])
    assert (run.info.run_name, run.info.status) == ("one", "FINISHED")
    history = {name: client.get_metric_history(run.info.run_id, name) for name in run.data.metrics}
    assert [(each.step, each.value) for each in history["ppo/kl"]] == KL
    assert [(each.step, each.value) for each in history["sft/loss"]] == [(9, 2.5)]
    assert run.data.metrics["objective"] == 0.75
    assert run.data.params["ppo.kl_ctl"] == "0.25"
    assert run.data.tags["run_dir"] == str(run_dir)
    assert run.data.tags["a"] == "true"
    assert run.data.tags["alarm.ppo.no_change"] == ALARM.line
    text = client.download_artifacts(run.info.run_id, "samples/ppo_000007.md", str(tmp_path))
    assert Path(text).read_text() == "actor, score 0.50, KL 0.25\n\n    2+2? *4*"
    result = client.download_artifacts(run.info.run_id, "result.json", str(tmp_path))
    assert json.loads(Path(result).read_text())["objective"] == 0.75


@pytest.mark.usefixtures("trackio_folder")
def test_trackio_has_one_run_with_each_step_once(compose: Compose, tmp_path: Path) -> None:
    import trackio
    from trackio.sqlite_storage import SQLiteStorage

    said = record_twice(compose, "trackio", tmp_path / "runs" / "one")
    assert not [line for line in said if "failed" in line]
    (run,) = trackio.Api().runs("rlhf")
    assert run.name == "runs/one"
    lines: list[dict[str, Any]] = SQLiteStorage.get_logs("rlhf", "runs/one")
    assert [(line["step"], line["ppo/kl"]) for line in lines if "ppo/kl" in line] == KL
    assert [line["step"] for line in lines if "sft/loss" in line] == [9]
    assert [line["objective"] for line in lines if "objective" in line] == [0.75]
    texts = {line["step"]: line["ppo/samples"]["_value"] for line in lines if "ppo/samples" in line}
    assert texts == dict.fromkeys((4, 7), "actor, score 0.50, KL 0.25\n\n    2+2? *4*")
    assert run.config is not None
    assert run.config["ppo.kl_ctl"] == 0.25
    assert ALARM.line in [each["text"] for each in run.alerts()]


@pytest.mark.parametrize("name", ["tensorboard", "mlflow", "trackio"])
def test_without_the_package_the_run_is_refused(
    name: str, compose: Compose, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("", ".tracking", ".sqlite_storage"):
        monkeypatch.setitem(sys.modules, f"{name}{module}", None)
    monkeypatch.setitem(sys.modules, f"torch.utils.{name}", None)
    with pytest.raises(CapabilityError, match=rf"tracking\W{name}.*: .*rlhf\[{name}\]"):
        build_tracker(run_of(compose, f"tracking={name}"), tmp_path, is_main=True, say=[].append)
