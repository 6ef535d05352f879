"""A chat with a pretrained model, which belongs to no run."""

import io
import json
import sys
from pathlib import Path

import pytest
from huggingface_hub import constants

from rlhf.chat.__main__ import greeting_lines, main
from rlhf.chat.dialogue import Dialogue
from rlhf.chat.run_models import ModelWithoutRun, find_model_without_run
from tests.chat.small_run import POSITIONS, save_run
from tests.conftest import Compose


def own_settings(folder: Path, **settings: object) -> None:
    (folder / "generation_config.json").write_text(json.dumps(settings))


@pytest.fixture
def folder(compose: Compose, tmp_path: Path) -> Path:
    return save_run(tmp_path / "run", compose) / "sft/model"


def test_it_answers_in_its_template_with_its_own_settings(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    own = {"do_sample": True, "temperature": 0.5, "top_k": 7, "top_p": 0.9, "min_p": 0.1}
    own_settings(folder, **own, eos_token_id=[1, 5])
    model = ModelWithoutRun(folder)
    sampling = model.sampling_settings
    assert (sampling.temperature, sampling.top_k, sampling.top_p) == (0.5, 7, 0.9)
    assert sampling.min_p == 0.1
    assert sampling.max_tokens == POSITIONS // 2
    assert model.talker._generation_config(sampling).eos_token_id == [1, 5]
    assert greeting_lines(model, sampling) == [
        str(folder),
        "temperature 0.5; /temperature X changes it",
        "/help lists the commands.",
    ]
    monkeypatch.setattr(sys, "stdin", io.StringIO("hello there\n"))
    assert main([str(folder), "--max-tokens=8", "--seed=1"]) == 0
    assert capsys.readouterr().out.strip()


def test_without_a_template_a_line_says_so(compose: Compose, tmp_path: Path) -> None:
    folder = save_run(tmp_path / "run", compose, expects_conversations=False) / "sft/model"
    own_settings(folder)
    model = ModelWithoutRun(folder)
    _, first, _, last = greeting_lines(model, model.sampling_settings)
    assert "temperature 0, always the likeliest token; /temperature X changes it" in first
    assert last.startswith("The tokenizer has no chat template: each line is plain text")


def test_a_run_is_no_lone_model_and_the_cache_of_the_hub_is_searched(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert find_model_without_run(tmp_path / "run") is None
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    repository = tmp_path / "models--me--chatty"
    for place in ("refs", "snapshots"):
        (repository / place).mkdir(parents=True)
    (repository / "refs/main").write_text("a" * 40)
    (repository / "snapshots" / ("a" * 40)).symlink_to(folder)
    found = find_model_without_run(Path("me/chatty"))
    assert found is not None
    assert (found.folder / "model.safetensors").is_file()


MISTAKES = [
    (["me/not_here"], "me/not_here is no folder, and no model of that name is in the hub's"),
    (["{folder}", "--model=sft"], "--model and --environment need the directory of a run"),
    (["{folder}", "--environment"], "--model and --environment need the directory of a run"),
    (["{folder}/.."], "has no config.yaml; and it holds no model: it has no config.json"),
    (["{folder}/../../reward/model"], "gives scores, not answers"),
]


def test_what_is_no_model_is_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words, message in MISTAKES:
        assert main([word.format(folder=folder) for word in words]) == 2
        error = capsys.readouterr().err
        assert message in error
        assert (error.count("error:"), error.count("\n")) == (1, 1)


def test_it_has_nothing_to_compare_with(folder: Path) -> None:
    model, said = ModelWithoutRun(folder), list[str]()
    talk = Dialogue(model, model.sampling_settings, write=said.append, say=said.append)
    talk.handle_line("/compare hi")
    assert said[-1].startswith("error: /compare needs the directory of a run with two policies")
