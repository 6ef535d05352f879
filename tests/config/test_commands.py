"""Commands that are refused by key and value, and commands that are not."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from rlhf.base.errors import RlhfError
from rlhf.config.effects import refuse_unread_keys
from rlhf.config.freeze import to_run_config
from rlhf.config.hydra_errors import explain_hydra_error, to_hydra_override
from tests.conftest import Compose

FOLDER = Path(__file__).parent


def commands(name: str) -> list[str]:
    lines = (FOLDER / name).read_text().splitlines()
    return [line for line in lines if not line.startswith("# ")]


def words_of(command: str) -> list[str]:
    return [to_hydra_override(word) for word in re.split(r" (?=[\w.@+~/]+=)", command)]


def refusal(compose: Compose, words: list[str]) -> str:
    """Compose and check a command's overrides; return the refusal, or "" if there is none."""
    try:
        refuse_unread_keys(to_run_config(compose(words)), words)
    except RlhfError as error:
        return str(error)
    except Exception as error:
        if (found := explain_hydra_error(error, words)) is None:
            raise
        return str(found)
    return ""


@pytest.mark.slow
def test_every_bad_command_is_refused(compose: Compose) -> None:
    wrong = []
    for line in commands("bad_commands.txt"):
        command, _, texts = line.partition(" # ")
        words = words_of(command)
        said = refusal(compose, words)
        keys = [word.partition("=")[0].lstrip("+~") for word in words]
        is_named = (
            all(map(said.__contains__, texts.split(" | ")))
            if texts
            else any(key in said for key in keys)
        )
        if not said or not is_named or "\n" in said:
            wrong.append(f"{command}: {said}")
    assert wrong == []


@pytest.mark.slow
def test_every_good_command_is_accepted(compose: Compose) -> None:
    for command in commands("good_commands.txt"):
        to_run_config(compose(words_of(command)))
