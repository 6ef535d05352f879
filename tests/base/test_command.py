"""Commands end with one line for an error that a user can fix, and hide no other error."""

import errno
import json
import math
import os
import subprocess

import pytest

from rlhf.base.command import Result, build_command_parser, run_to_exit_code, set_cuda_allocator
from rlhf.base.errors import CheckpointError
from rlhf.base.foreign_errors import convert_drive_errors
from tests.documents import read_document


def refuse() -> None:
    raise CheckpointError("\x1b[31mno run; WANDB_API_KEY=0123456789abcdef")


def test_an_error_is_one_safe_line_and_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_to_exit_code(refuse) == 2
    assert capsys.readouterr().err == "error: \ufffd[31mno run; WANDB_API_KEY=[redacted]\n"
    assert run_to_exit_code(lambda: None) == 0
    assert capsys.readouterr().err == ""


def test_json_is_all_that_stdout_has(capfd: pytest.CaptureFixture[str]) -> None:
    def work() -> Result:
        print("a notice")
        subprocess.run(["echo", "a child's notice"], check=True)
        return Result({"loss": math.nan}, exit_code=1)

    assert run_to_exit_code(work, as_json=True) == 1
    out, err = capfd.readouterr()
    assert json.loads(out) == {"loss": None}
    assert err == "a notice\na child's notice\n"
    assert run_to_exit_code(work) == 1
    assert capfd.readouterr().out.startswith("a ")


def test_a_refusal_is_json_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_to_exit_code(refuse, as_json=True) == 2
    out, err = capsys.readouterr()
    refused = read_document("any", out)["error"]
    assert err == f"error: {refused['message']}\n"
    assert (refused["key"], refused["rule"]) == (None, refused["message"])
    parser = build_command_parser("rlhf.none", None, has_json=True)
    parser.add_argument("--minutes", type=float)
    with pytest.raises(SystemExit, match="2"):
        parser.parse_args(["--json", "--minutes", "long"])
    refused = read_document("any", capsys.readouterr().out)["error"]
    assert (refused["key"], refused["rule"]) == ("--minutes", "invalid float value: 'long'")


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EDQUOT, errno.EFBIG])
def test_an_error_of_the_drive_is_one_message(
    number: int, capsys: pytest.CaptureFixture[str]
) -> None:
    def work() -> None:
        raise OSError(number, os.strerror(number), "/drive/file")

    assert run_to_exit_code(work) == 2
    expected = f"error: /drive/file cannot be written ({os.strerror(number)})"
    assert capsys.readouterr().err.startswith(expected)


def test_a_bug_keeps_its_traceback() -> None:
    with pytest.raises(ZeroDivisionError):
        run_to_exit_code(lambda: 1 / 0 and None)
    with pytest.raises(FileNotFoundError), convert_drive_errors():
        raise FileNotFoundError(errno.ENOENT, "No such file")  # as of a process
    with pytest.raises(PermissionError), convert_drive_errors():  # as of a port, which has no file
        raise PermissionError(errno.EACCES, "Permission denied")


@pytest.mark.parametrize(
    ("given", "added"),
    [
        ({}, {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}),
        ({"PYTORCH_ALLOC_CONF": "max_split_size_mb:64"}, {}),
        ({"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"}, {}),
    ],
)
def test_the_users_allocator_stays(
    given: dict[str, str], added: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "environ", dict(given))
    set_cuda_allocator()
    assert os.environ == given | added
