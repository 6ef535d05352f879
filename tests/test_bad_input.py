"""Bad input of every kind: one message that says what to mend, and exit code 2."""

import runpy
from collections.abc import Callable
from pathlib import Path

import pytest
from hydra.core.global_hydra import GlobalHydra
from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

from rlhf.base.cpu import can_train_fp16
from rlhf.config.freeze import to_run_config, write_frozen_config
from tests.conftest import Compose
from tests.fork_server import WarmPopen
from tests.models_on_disk import save_models
from tests.runs import ROOT, TINY_RUN, words_that_are_read

pytestmark = pytest.mark.slow

Answer = tuple[int, str]


@pytest.fixture
def answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., Answer]:
    """Run launch.py in this process; returns its exit code and what it wrote to stderr."""

    def run(*arguments: str) -> Answer:
        GlobalHydra.instance().clear()
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr("sys.argv", ["launch.py", *arguments])
        monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
        monkeypatch.setattr(subprocess_handler, "Popen", WarmPopen)  # torchrun's, for ranks
        capsys.readouterr()  # what the test itself has written, such as bars of progress
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(str(ROOT / "launch.py"), run_name="__main__")
        return int(ended.value.code or 0), capsys.readouterr().err

    return run


def refused(answer: Answer, *parts: str) -> None:
    code, message = answer
    assert code == 2, message
    assert message.startswith("error: ")
    assert "Traceback" not in message
    for part in parts:
        assert part in message


PPO_ON_FOLDERS = words_that_are_read(
    [
        *(override for override in TINY_RUN if not override.startswith("model.")),
        "phase=ppo",
        "model=pretrained",
        "model.path=policy",
        "model@reward_model=pretrained",
    ]
)


MODELS = {
    "no checkpoint": (
        ["experiment=smoke", "model=pretrained", "model.path=folder"],
        ["model.path=folder", "notes.txt", "config.json"],
    ),
    "another tokenizer": (
        [*PPO_ON_FOLDERS, "reward_model.path=reward"],
        ["reward_model (reward) and model have different tokenizers"],
    ),
    "a language model": (
        [*PPO_ON_FOLDERS, "reward_model.path=policy"],
        ["reward_model.path=policy is not a trained reward model", "phase=reward"],
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_folder_of_another_model_is_refused(name: str, answer, tmp_path: Path) -> None:
    words, parts = MODELS[name]
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "notes.txt").write_text("nothing here")
    save_models(tmp_path, policy="some words", reward="entirely other text")
    refused(answer(*words), *parts)


def test_fp16_without_masters(answer) -> None:
    reason = "use zero=stage1" if can_train_fp16() else "has no fp16 arithmetic"
    refused(answer(*TINY_RUN, "hardware.dtype=fp16", "zero=stage0"), "fp16", reason)


def test_nothing_is_left_of_a_refused_command(answer, tmp_path: Path) -> None:
    answer("zero=stage9")
    answer("sft.batch_size=0")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("words", [[], ["-m", "seed=1,2"]])
def test_a_secret_in_the_command_is_written_nowhere(
    answer, tmp_path: Path, words: list[str]
) -> None:
    secret = "+hydra.job.env_set.HF_TOKEN=abcdef"
    wrong = "ppo.steps=x"  # refused only after Hydra has written multirun.yaml
    refused(answer(*TINY_RUN, *words, wrong, secret), "HF_TOKEN=[redacted]: is or holds a key")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("words", [["run_dir=new"], ["-m", "seed=1,2"], ["resume=old"]])
def test_a_value_that_is_a_secret_is_written_nowhere(
    answer, compose: Compose, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    (tmp_path / "old").mkdir()
    write_frozen_config(to_run_config(compose(TINY_RUN)), tmp_path / "old")
    monkeypatch.setenv("MY_PASSWORD", "correcthorsebattery")
    monkeypatch.setenv("WHICH", "MY_PASSWORD")
    asked = [] if words == ["resume=old"] else TINY_RUN
    wrong = "tracking.project='${oc.env:${oc.env:WHICH}}'"
    code, message = answer(*words, *asked, wrong)
    assert code == 2
    assert "error: tracking.project=[redacted]: is or holds a key" in message
    assert "correcthorse" not in message
    texts = [path.read_text() for path in tmp_path.rglob("*") if path.is_file()]
    assert not [text for text in texts if "correcthorse" in text]


def test_data_cannot_command_the_terminal(answer, tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_text("\x1b[2J,\x1b[2J\na,b\n")
    code, message = answer(*TINY_RUN, "data=local", "data.path=x.csv")
    assert (code, message.count("\x1b"), message.count("\ufffd[2J")) == (2, 0, 2), message
