"""Finished phases: damage is found before their models are used."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from rlhf.base.errors import CheckpointError
from rlhf.config.choices import Phase
from rlhf.run.finished_phase import finish_phase, verify_model, verify_phase
from rlhf.run.results import finished_phases, read_phase_result
from tests.runs import flip


def line(phase: str, step: int) -> str:
    return json.dumps({"phase": phase, "step": step}) + "\n"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run that has finished sft and logs reward."""
    (tmp_path / "sft" / "model").mkdir(parents=True)
    (tmp_path / "sft" / "model" / "weights").write_bytes(bytes(1000))
    (tmp_path / "sft" / "state").mkdir()
    (tmp_path / "sft" / "state" / "optimizer").write_text("of a step")
    lines = [line("sft", 1), line("reward", 1), line("sft", 2)]
    (tmp_path / "metrics.jsonl").write_text("".join(lines))
    finish_phase(tmp_path, Phase.sft, {"perplexity_after": float("nan"), "steps": 2})
    return tmp_path


def test_an_intact_phase_needs_no_words(run: Path) -> None:
    assert finished_phases(run) == [Phase.sft]
    (run / "sft" / "notes.txt").write_text("the user's own")
    (run / "sft" / "state" / "optimizer").unlink()
    with (run / "metrics.jsonl").open("a") as file:  # a drive refused these two lines before
        file.write(line("reward", 2) + line("sft", 3) + '{"torn')
    assert verify_phase(run, Phase.sft) is None
    verify_model(run / "sft" / "model")


DAMAGES: dict[str, tuple[str, Callable[[Path], object]]] = {
    "a flipped bit": ("model/weights", flip),
    "half a file": ("model/weights", lambda path: path.write_bytes(bytes(500))),
    "no file": ("model/weights", Path.unlink),
    "another file": ("model/adapter_config.json", lambda path: path.write_text("{}")),
    "a result of others": ("result.json", lambda path: path.write_text('{"steps": 3}')),
    "no manifest's content": ("manifest.json", lambda path: path.write_text('{"files": [3]}')),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_refused_by_name_and_with_a_way_out(damage: str, run: Path) -> None:
    name, act = DAMAGES[damage]
    act(run / "sft" / name)
    with pytest.raises(CheckpointError) as caught:
        verify_phase(run, Phase.sft)
    assert str(run / "sft" / name) in str(caught.value)
    assert f"remove {run}/sft/result.json: python launch.py resume={run}" in str(caught.value)
    if not name.startswith("result"):
        with pytest.raises(CheckpointError):
            verify_model(run / "sft" / "model")


@pytest.mark.parametrize(
    "content", ["", line("reward", 1) + line("sft", 2), "garbage\n" + line("sft", 1)]
)
def test_lost_log_lines_are_noticed(content: str, run: Path) -> None:
    (run / "metrics.jsonl").write_text(content)
    notice = verify_phase(run, Phase.sft)
    assert notice is not None
    assert notice.startswith(f"{run}/metrics.jsonl does not have the 2 lines that sft wrote")


def test_a_phase_of_an_older_version_is_accepted_with_a_word(run: Path) -> None:
    (run / "sft" / "manifest.json").unlink()
    assert "not verified" in (verify_phase(run, Phase.sft) or "")
    verify_model(run / "sft" / "model")


def test_the_result_is_json_and_comes_back_with_its_nan(run: Path) -> None:
    text = (run / "sft" / "result.json").read_text()
    assert json.loads(text, parse_constant=pytest.fail) == {"perplexity_after": None, "steps": 2}
    assert str(read_phase_result(run, Phase.sft)) == "{'perplexity_after': nan, 'steps': 2}"


@pytest.mark.parametrize("content", ["", "null", "[]", "5", "{}", "{", "[" * 100_000])
def test_a_damaged_result_is_not_an_unfinished_phase(content: str, run: Path) -> None:
    (run / "sft" / "result.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"sft/result\.json is damaged"):
        read_phase_result(run, Phase.sft)
