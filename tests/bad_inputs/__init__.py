"""Bad inputs at every door of the program, and its answer to each.

A door yields inputs: a label, and a call that raises RlhfError, which ends a command with exit code
2, or returns the line that counts what was skipped.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from omegaconf import DictConfig

from rlhf.base.errors import RlhfError
from rlhf.config.effects import refuse_unread_keys
from rlhf.config.freeze import to_run_config
from rlhf.config.hydra_errors import explain_hydra_error, to_hydra_override
from tests.bad_inputs.doors import Input, data_inputs, environment_inputs, model_inputs, run_inputs

COMMANDS = Path(__file__).with_name("commands.txt")
Compose = Callable[[list[str]], DictConfig]


class Answer(NamedTuple):
    """The answer of the program at a door; "" if it accepted the input in silence."""

    door: str
    label: str
    text: str


def all_answers(
    compose: Compose, folder: Path, set_environment: Callable[[Mapping[str, str]], None]
) -> list[Answer]:
    """Try every input, with files in ``folder``."""
    config = to_run_config(compose([]))
    doors: dict[str, Iterable[Input]] = {
        "Commands": [(line, _command(compose, line)) for line in _lines()],
        "Data": data_inputs(config, _made(folder / "data")),
        "Models and tokenizers": model_inputs(_made(folder / "models")),
        "Runs": run_inputs(_made(folder / "runs")),
        "Environment": environment_inputs(config, set_environment),
    }
    return [
        Answer(door, label, _answer(call).replace(f"{folder}/", ""))
        for door, inputs in doors.items()
        for label, call in inputs
    ]


def _lines() -> list[str]:
    lines = COMMANDS.read_text().splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def _command(compose: Compose, line: str) -> Callable[[], str]:
    """Return a call that composes and checks the command's overrides."""
    words = [to_hydra_override(word) for word in re.split(r" (?=[\w.@+]+=)", line)]

    def check() -> str:
        try:
            refuse_unread_keys(to_run_config(compose(words)), words)
        except RlhfError:
            raise
        except Exception as error:
            if (found := explain_hydra_error(error, words)) is None:
                raise
            raise found from error
        return ""

    return check


def _answer(call: Callable[[], str]) -> str:
    try:
        return call()
    except RlhfError as error:
        return str(error)


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True)
    return folder
