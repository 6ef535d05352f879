"""Commands end with one line for an error that a user can fix, and hide no other error."""

from __future__ import annotations

import errno
import os

import pytest

from rlhf.base.command import run_to_exit_code
from rlhf.base.errors import CheckpointError
from rlhf.base.foreign_errors import convert_drive_errors


def refuse() -> None:
    raise CheckpointError("\x1b[31mno run; WANDB_API_KEY=0123456789abcdef")


def test_an_error_is_one_safe_line_and_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_to_exit_code(refuse) == 2
    assert capsys.readouterr().err == "error: \ufffd[31mno run; WANDB_API_KEY=[redacted]\n"
    assert run_to_exit_code(lambda: None) == 0
    assert capsys.readouterr().err == ""


def test_a_mistake_of_the_program_is_not_hidden() -> None:
    with pytest.raises(ZeroDivisionError):
        run_to_exit_code(lambda: 1 / 0 and None)


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
    with pytest.raises(FileNotFoundError), convert_drive_errors():
        raise FileNotFoundError(errno.ENOENT, "No such file")  # as of a process
    with pytest.raises(PermissionError), convert_drive_errors():  # as of a port, which has no file
        raise PermissionError(errno.EACCES, "Permission denied")
