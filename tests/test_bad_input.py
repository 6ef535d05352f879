"""Bad input of every kind: one message that says what to mend, and exit code 2."""

import json
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


def pairs(count: int) -> str:
    rows = (
        {"prompt": f"\n\nHuman: {i}\n\nAssistant:", "chosen": f" yes {i}", "rejected": " no"}
        for i in range(count)
    )
    return "".join(json.dumps(row) + "\n" for row in rows)


PPO_ON_FOLDERS = words_that_are_read(
    [
        *(override for override in TINY_RUN if not override.startswith("model.")),
        "phase=ppo",
        "model=pretrained",
        "model.path=policy",
        "model@reward_model=pretrained",
    ]
)


# What the folder holds; the command; what the message names.
CASES = [
    (pairs(3) + '{"prompt": \n', ["pairs.jsonl, row 4"]),
    (pairs(40), ["sft phase has", "sft.batch_size=32"]),
]


@pytest.mark.parametrize(("rows", "parts"), CASES, ids=["malformed row", "less than a batch"])
def test_the_message_names_what_to_mend(
    rows: str, parts: list[str], answer, tmp_path: Path
) -> None:
    (tmp_path / "pairs.jsonl").write_text(rows)
    refused(answer("data=local", "data.path=pairs.jsonl"), *parts)


def test_a_folder_that_is_no_checkpoint(answer, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "notes.txt").write_text("nothing here")
    refused(
        answer(*TINY_RUN, "model=pretrained", "model.path=folder"),
        "model.path=folder",
        "notes.txt",
        "config.json",
    )


def test_reward_model_with_another_tokenizer(answer, tmp_path: Path) -> None:
    save_models(tmp_path, policy="some words", reward="entirely other text")
    refused(
        answer(*PPO_ON_FOLDERS, "reward_model.path=reward"),
        "reward_model (reward) and model have different tokenizers",
    )


def test_a_language_model_is_no_reward_model(answer, tmp_path: Path) -> None:
    save_models(tmp_path, policy="some words", reward="some words")
    refused(
        answer(*PPO_ON_FOLDERS, "reward_model.path=policy"),
        "reward_model.path=policy is not a trained reward model",
        "phase=reward",
    )


def test_fp16_without_masters(answer) -> None:
    reason = "use zero=stage1" if can_train_fp16() else "has no fp16 arithmetic"
    refused(answer(*TINY_RUN, "hardware.dtype=fp16", "zero=stage0"), "fp16", reason)


@pytest.mark.parametrize("more", [[], ["hardware.ranks_per_node=2"]], ids=["1 rank", "2 ranks"])
def test_a_model_that_fast_rollouts_cannot_decode(answer, tmp_path: Path, more: list[str]) -> None:
    save_models(tmp_path, policy="some words", reward="some words")
    config = tmp_path / "policy" / "config.json"
    window = {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": 4}
    config.write_text(json.dumps(json.loads(config.read_text()) | window))
    refused(
        answer(*PPO_ON_FOLDERS, "reward_model.path=reward", *more),
        "rollout.backend=fast: a model of model_type=mistral attends to 4 tokens at most",
        "use rollout=hf",
    )


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
