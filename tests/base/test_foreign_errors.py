"""Errors of libraries become ours; errors of this program stay what they are."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors import SafetensorError, safe_open
from tokenizers import Tokenizer

from rlhf.base.errors import CheckpointError, ConfigError
from rlhf.base.foreign_errors import is_foreign, reason_of, translate_errors
from rlhf.base.metrics import Moments
from rlhf.data.records import UnusableRowError


def refused(reason: str) -> CheckpointError:
    return CheckpointError(f"model.path=m: {reason}")


def open_weights(folder: Path) -> None:
    (folder / "weights").write_bytes(b"no weights")
    safe_open(folder / "weights", "pt")


def open_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").write_text('{"model": {"type": "nothing"}}')
    Tokenizer.from_file(str(folder / "tokenizer.json"))


@pytest.mark.parametrize(
    "act",
    [
        open_weights,
        open_tokenizer,
        lambda _: json.loads("[" * 100_000),
        lambda folder: (folder / "missing").read_text(),
    ],
)
def test_an_error_of_a_library_becomes_ours(act: Callable[[Path], None], tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"^model.path=m: .+"), translate_errors(refused):
        act(tmp_path)


def test_a_bug_of_this_program_keeps_its_traceback() -> None:
    with pytest.raises(TypeError), translate_errors(refused):
        Moments.of(None, None)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "error", [ConfigError("seed=x"), MemoryError(), UnusableRowError("prompt is null")]
)
def test_errors_with_a_meaning_of_their_own_pass(error: Exception) -> None:
    with pytest.raises(type(error)), translate_errors(refused):
        raise error


def test_the_reason_is_one_line() -> None:
    assert reason_of(ValueError("\n first \n second")) == "first"
    assert reason_of(ValueError("errors:\n one \n two")) == "errors: one"
    assert reason_of(KeyError("a")) == "'a' is missing"
    assert reason_of(RecursionError()) == "RecursionError"
    assert reason_of(FileNotFoundError(2, "No such file", "/x")) == "No such file: /x"
    assert reason_of(SafetensorError("cut off")) == "SafetensorError: cut off"


def test_the_type_decides_where_rust_leaves_no_frame() -> None:
    assert is_foreign(SafetensorError("cut off"))
    assert is_foreign(Exception("unknown model type"))
    assert not is_foreign(ConfigError("seed=x"))
