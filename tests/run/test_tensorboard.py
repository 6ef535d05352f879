"""TensorBoard's event file, read back."""

import sys
from pathlib import Path
from typing import Any

import pytest

from rlhf.base.errors import CapabilityError
from rlhf.config.choices import WandbMode
from rlhf.run.tracker import Sample
from rlhf.run.trackers import TensorBoardTracker, build_tracker
from tests.run.test_trackers import run_config

# Its protocol buffers are written in C, in the older way.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


def read(folder: Path) -> Any:
    """What is in the event files of a folder."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder), {"histograms": 0, "scalars": 0, "tensors": 0})
    events.Reload()
    return events


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Steps and values of every tag in a folder."""
    events = read(folder)
    return {
        tag: [(event.step, event.value) for event in events.Scalars(tag)]
        for tag in events.Tags()["scalars"]
    }


def test_each_phase_has_its_own_tags_and_steps(tmp_path: Path) -> None:
    config = run_config(WandbMode.disabled, tensorboard=True)
    tracker = build_tracker(config, tmp_path, is_main=True, say=[].append)
    tracker.log("sft", 1, {"sft/loss": 2.5})
    tracker.log("sft", 2, {"sft/loss": 2.25})
    tracker.log("ppo", 1, {"ppo/clipfrac": 0.5, "time/step_seconds": 3.0})
    tracker.finish()
    assert {path.name for path in tmp_path.iterdir()} == {"metrics.jsonl", "tensorboard"}
    assert scalars(tmp_path / "tensorboard") == {
        "sft/loss": [(1, 2.5), (2, 2.25)],
        "ppo/clipfrac": [(1, 0.5)],
        "time/step_seconds": [(1, 3.0)],
    }, "the same names as everywhere"


def test_numbers_of_an_options_log_are_histograms_and_not_repeated(tmp_path: Path) -> None:
    lines: list[dict[str, Any]] = [{"score": 0.5, "text": "a", "kl": None}, {"score": 1.5, "n": 1}]
    for steps in ((1, 2), (2, 3)):  # the second run repeats step 2
        tracker = TensorBoardTracker(tmp_path, {})
        for step in steps:
            tracker.lines("rollouts.jsonl", "ppo", step, lines)
        tracker.finish()
    events = read(tmp_path)
    assert events.Tags()["histograms"] == ["ppo/histograms/rollouts/score"]
    found = events.Histograms("ppo/histograms/rollouts/score")
    assert [event.step for event in found] == [1, 2, 3]
    value = found[0].histogram_value
    assert (value.num, value.min, value.max) == (2, 0.5, 1.5)


def test_samples_are_text_and_the_result_comes_with_the_hyper_parameters(tmp_path: Path) -> None:
    tracker = TensorBoardTracker(tmp_path, {"seed": 3, "ppo": {"kl_ctl": 0.25, "epochs": None}})
    tracker.samples("ppo", 4, [Sample("2+2?", " *4*", True, 0.5, 0.25, [])], steps=8)
    tracker.conclude({"objective": 0.75})
    tracker.finish()
    events = read(tmp_path)
    (text,) = events.Tensors("ppo/samples/text_summary")
    assert (text.step, text.tensor_proto.string_val) == (
        4,
        [b"actor, score 0.50, KL 0.25\n\n    2+2? *4*"],
    )
    metadata = events.SummaryMetadata("_hparams_/session_start_info").plugin_data.content
    assert all(word in metadata for word in (b"seed", b"ppo.kl_ctl", b"None"))
    assert [event.value for event in events.Scalars("objective")] == [0.75]


def test_steps_that_are_repeated_after_resume_are_written_once(tmp_path: Path) -> None:
    for steps in ((1, 2, 3, 4), (3, 4, 5)):  # killed after step 4, resumed after step 2
        tracker = TensorBoardTracker(tmp_path, {})
        tracker.log("sft", 9, {"sft/loss": 2.5})
        for step in steps:
            tracker.log("ppo", step, {"ppo/clipfrac": step / 8})
        tracker.samples("ppo", steps[-1] - 1, [Sample("p", "r", True, 0.5, 0.25, [])], steps=8)
        tracker.samples("ppo", 4, [Sample("p", "r", True, 0.5, 0.25, [])], steps=8)
        tracker.finish()
    expected = [(step, step / 8) for step in (1, 2, 3, 4, 5)]
    assert scalars(tmp_path) == {"sft/loss": [(9, 2.5)], "ppo/clipfrac": expected}
    texts = read(tmp_path).Tensors("ppo/samples/text_summary")
    assert [text.step for text in texts] == [3, 4]


def test_without_the_package_the_way_out_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(CapabilityError, match=r"tracking\.tensorboard=true: .*pip install"):
        TensorBoardTracker(tmp_path, {})
