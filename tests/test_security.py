"""What SECURITY.md promises and no other test checks, and that every test which it names exists."""

import json
import os
import pickle
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from rlhf.base.errors import CheckpointError, ConfigError
from rlhf.base.safe_text import SECRET_PATTERNS
from rlhf.base.stored_files import DamagedFileError
from rlhf.config.choices import Phase
from rlhf.config.freeze import to_run_config, write_command
from rlhf.config.validation import refuse_secret_values, refuse_secrets_in_command
from rlhf.jobs.sweep_jobs import open_log
from rlhf.models.build import ModelSource, build_actor
from rlhf.models.tokenizers import train_tokenizer
from rlhf.report.summary import answers_side_by_side
from rlhf.run.finished_phase import copy_phase_lines
from rlhf.run.jsonl import JsonlWriter
from rlhf.runtime.worker import refuse_output_links
from tests.conftest import Compose
from tests.test_parity import functions_of

ROOT = Path(__file__).parents[1]
NAMED = sorted(set(re.findall(r"`tests/(\S+?)::(test_\w+)`", (ROOT / "SECURITY.md").read_text())))


def test_every_named_test_exists() -> None:
    for path, name in NAMED:
        assert name in functions_of(ROOT / "tests" / path), f"{path}::{name}"


def test_every_promise_names_a_test() -> None:
    text = (ROOT / "SECURITY.md").read_text()
    promises = re.findall(r"^\| (.*) \| (.*) \|$", text, re.MULTILINE)[2:]
    assert len(promises) > 10
    assert [what for what, tests in promises if not re.search("`tests/.*::test_", tests)] == []


class Payload:
    """A file that runs code when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self._mark = mark

    def __reduce__(self) -> tuple[Callable[[Path], None], tuple[Path]]:
        return Path.touch, (self._mark,)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.safetensors", "model.pt"])
def test_a_model_that_must_be_unpickled_is_refused(name: str, tmp_path: Path) -> None:
    folder, mark = tmp_path / "model", tmp_path / "was unpickled"
    folder.mkdir()
    config = {"model_type": "llama", "hidden_size": 8, "num_attention_heads": 1}
    config |= {"num_hidden_layers": 1, "intermediate_size": 8, "vocab_size": 300}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / name).write_bytes(pickle.dumps(Payload(mark)))
    tokenizer = train_tokenizer(["text"], vocab_size=300)
    with pytest.raises(CheckpointError, match="safetensors"):
        build_actor(ModelSource(key="model.path", path=str(folder)), tokenizer, seed=1)
    assert not mark.exists()
    pickle.loads((folder / name).read_bytes())
    assert mark.exists(), "the file is dangerous"


def test_code_of_a_model_folder_does_not_run(tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "own.py").write_text(f"open({str(mark)!r}, 'w')")
    config = {
        "model_type": "own",
        "auto_map": {"AutoConfig": "own.A", "AutoModelForCausalLM": "own.B"},
    }
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    tokenizer = train_tokenizer(["text"], vocab_size=300)
    with pytest.raises(CheckpointError, match=r"model\.trust_remote_code"):
        build_actor(ModelSource(key="model.path", path=str(tmp_path / "model")), tokenizer, seed=1)
    assert not mark.exists()


EXAMPLES = {
    "a Hugging Face token": f"hf_{'a' * 34}",
    "an API key": f"sk-proj-{'a1' * 12}",
    "a W&B key": "0123456789abcdef" * 2 + "01234567",
    "a GitHub token": f"ghp_{'a' * 36}",
    "a GitLab token": f"glpat-{'a1' * 10}",
    "a Google key": f"AIza{'a1-_x' * 7}",
    "a Slack token": "xoxb-1234-5678-abcdef",
    "an AWS key": f"AKIA{'A' * 16}",
    "a JSON web token": "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.c2ln",
    "a password in an address": "https://me:secret@example.org/data.jsonl",
    "a token in an address": f"https://{'a1' * 10}@example.org/data.jsonl",
    "a key in an address": "https://example.org/data.jsonl?sig=abc",
    "an HTTP credential": "Authorization: Bearer abcdef123456",
}


@pytest.mark.parametrize("name", SECRET_PATTERNS)
def test_a_secret_in_the_command_is_refused_and_not_repeated(name: str, compose: Compose) -> None:
    value = EXAMPLES[name]
    with pytest.raises(ConfigError) as caught:
        to_run_config(compose([f"model.tokenizer='{value}'"]))
    assert str(caught.value).startswith(f"model.tokenizer: the value looks like {name}.")
    assert value not in str(caught.value)


def test_commits_and_folders_are_not_secrets(compose: Compose) -> None:
    commit = "0123456789abcdef" * 2 + "01234567"
    hub = ["model=opt_125m", f"model.revision={commit}", f"model.path=/hub/snapshots/{commit}"]
    to_run_config(compose(hub))


SECRET_ENVIRONMENT = {"MY_PASSWORD": "correcthorsebattery", "PIN_KEY": "12345678"}


@pytest.mark.parametrize(
    "word",
    [
        "tracking.project='${oc.env:MY_PASSWORD}'",
        "hydra.sweep.dir='runs/a-${ oc.env:MY_PASSWORD}'",
        "seed='${oc.decode:${oc.env:PIN_KEY,1}}'",
        "name=\"${oc.env:'MY_PASSWORD'}\"",
    ],
)
def test_a_command_that_reads_a_secret_is_refused(word: str) -> None:
    with pytest.raises(ConfigError, match="is or holds a key") as caught:
        refuse_secrets_in_command(["seed=1", word], SECRET_ENVIRONMENT)
    assert str(caught.value).startswith(f"{word}: ")
    refuse_secrets_in_command([word], {})


@pytest.mark.parametrize(
    ("word", "key"),
    [
        ("tracking.project='of ${oc.env:${name}}'", "tracking.project"),
        ("hardware.name='${oc.env:${name}}'", "hardware.name"),
        ("+model.architecture={a: {b: '${oc.env:${name}}'}}", "model.architecture.a.b"),
        ("+model.architecture.extra=['${oc.env:${name}}']", "model.architecture.extra"),
    ],
)
def test_a_value_that_is_a_secret_of_the_environment_is_refused(
    word: str, key: str, compose: Compose, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_PASSWORD", SECRET_ENVIRONMENT["MY_PASSWORD"])
    config = to_run_config(compose(["name=MY_PASSWORD", word]))
    with pytest.raises(ConfigError, match="is or holds a key") as caught:
        refuse_secret_values(config, os.environ)
    assert str(caught.value).startswith(f"{key}=")
    assert SECRET_ENVIRONMENT["MY_PASSWORD"] not in str(caught.value)
    refuse_secret_values(config, {"MY_PASSWORD": "another one", "USER": "correcthorsebattery"})


@pytest.mark.parametrize("name", ["metrics.jsonl", "tokenizer", "ppo", "ppo/state", "ppo/sampling"])
def test_nothing_is_written_through_a_link(name: str, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    (run_dir / name).parent.mkdir(parents=True)
    refuse_output_links(run_dir, [Phase.ppo])
    (run_dir / name).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match=f"{name} is a link to {tmp_path}/elsewhere: a run"):
        refuse_output_links(run_dir, [Phase.ppo])


APPENDED: dict[str, Callable[[Path], object]] = {
    "output.log": lambda path: open_log(path.parent).close(),
    "metrics.jsonl": lambda path: JsonlWriter(path).close(),
    "samples.jsonl": lambda path: copy_phase_lines(path.parent, Phase.ppo, path.parent, path.name),
}


@pytest.mark.parametrize("kind", ["link to a file", "pipe"])
@pytest.mark.parametrize("name", APPENDED)
def test_nothing_is_appended_to_a_link_or_a_pipe(name: str, kind: str, tmp_path: Path) -> None:
    run_dir, victim = tmp_path / "run", tmp_path / "victim"
    run_dir.mkdir()
    if kind == "pipe":
        os.mkfifo(run_dir / name)
        reader = os.open(run_dir / name, os.O_RDONLY | os.O_NONBLOCK)  # a writer would not wait
    else:
        (run_dir / name).symlink_to(victim)
    if kind == "link to a file":
        victim.write_text("kept")
    with pytest.raises(DamagedFileError, match=f"{name} is damaged.*a (link|regular file)"):
        APPENDED[name](run_dir / name)
    if kind == "pipe":
        os.close(reader)
    assert not victim.exists() or victim.read_text() == "kept"


def test_a_link_in_a_new_run_directory_is_replaced(tmp_path: Path) -> None:
    other = tmp_path / "precious"
    other.write_text("kept")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "command.txt").symlink_to(other)
    write_command(["seed=1"], tmp_path / "run")
    assert other.read_text() == "kept"
    assert (tmp_path / "run" / "command.txt").read_text() == "python launch.py seed=1\n"


def test_answers_cannot_control_the_terminal(tmp_path: Path) -> None:
    evil = "\x1b]0;owned\x07\x1b[2Jfine\u202e"
    samples = [
        {"phase": "ppo", "step": s, "prompt": "a\x1b[2J", "response": evil, "ended": True}
        for s in (0, 1)
    ]
    (tmp_path / "samples.jsonl").write_text("".join(json.dumps(s) + os.linesep for s in samples))
    text = "".join(answers_side_by_side(tmp_path))
    assert "fine" in text
    assert text.isprintable()
