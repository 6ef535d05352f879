"""Commands end with one line for an error that a user can fix, and hide no other error."""

from __future__ import annotations

import pytest

from rlhf.command import exit_code
from rlhf.errors import CheckpointError


def refuse() -> None:
    raise CheckpointError("\x1b[31mno run; WANDB_API_KEY=0123456789abcdef")


def test_an_error_is_one_safe_line_and_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code(refuse) == 2
    assert capsys.readouterr().err == "error: \ufffd[31mno run; WANDB_API_KEY=[redacted]\n"
    assert exit_code(lambda: None) == 0
    assert capsys.readouterr().err == ""


def test_a_mistake_of_the_program_is_not_hidden() -> None:
    with pytest.raises(ZeroDivisionError):
        exit_code(lambda: 1 / 0 and None)
