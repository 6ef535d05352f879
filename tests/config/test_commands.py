"""Commands that are refused by key and value, and commands that are not."""

import re
from pathlib import Path

import pytest
import yaml

from rlhf.base.errors import ConfigError, RlhfError
from rlhf.base.refusals import refusal_as_json
from rlhf.config.effects import refuse_unread_keys
from rlhf.config.hydra_errors import (
    explain_hydra_error,
    refuse_words_of_other_programs,
    schema_types,
    to_hydra_override,
)
from rlhf.config.schema.rewards import KEYS_BY_KIND, AnyRewardKind
from rlhf.config.typed import to_run_config
from tests.conftest import Compose

FOLDER = Path(__file__).parent
# Messages of Hydra itself, which name no key in our form.
OF_HYDRA = "Could not delete from config|Error merging override"


def commands(name: str) -> list[str]:
    """Return the lines of a file of this folder, and of the files of options and methods."""
    files = [FOLDER / name, *sorted(FOLDER.parent.glob(f"options/*/{name}"))]
    files += sorted(FOLDER.parent.glob(f"lab/*/{name}"))
    lines = [line for file in files for line in file.read_text().splitlines()]
    return [line for line in lines if not line.startswith("# ")]


def words_of(command: str) -> list[str]:
    return [to_hydra_override(word) for word in re.split(r" (?=[\w.@+~/]+=)", command)]


def refusal(compose: Compose, words: list[str]) -> str:
    """Compose and check a command's overrides; return the refusal, or "" if there is none."""
    try:
        refuse_words_of_other_programs(words)
        refuse_unread_keys(to_run_config(compose(words)), words)
    except RlhfError as error:
        return str(error)
    except Exception as error:
        if (found := explain_hydra_error(error, words)) is None:
            raise
        return str(found)
    return ""


def is_split_rightly(said: str, words: list[str]) -> bool:
    """Return True if the JSON of a refusal has its key, and the value that was typed for it."""
    found = refusal_as_json(ConfigError(said))
    key, value = found["key"], found["value"]
    if re.match(OF_HYDRA, said):
        return key is value is found["remedy"] is None
    if key is None:
        return False
    typed = dict(word.lstrip("+").partition("=")[::2] for word in words)
    key = key.lstrip("+")
    names = re.split(r" \+ |/ranks$", key)  # two keys, or the share of a rank
    for name in filter(None, names):
        if name not in schema_types() and not name.startswith(tuple(typed)):
            return False
    if value is None:
        return f"{key}=" not in re.split("[:;] ", said)[0]
    if key not in typed or value == typed[key].strip("'"):
        return True
    meant, stated = yaml.safe_load(typed[key]), yaml.safe_load(value)  # 0 is stated as 0.0
    return stated == meant or (isinstance(meant, list) and stated in meant)


@pytest.mark.slow
def test_every_bad_command_is_refused(compose: Compose) -> None:
    wrong = []
    for line in commands("bad_commands.txt"):
        command, _, texts = line.partition(" # ")
        words = words_of(command)
        said = refusal(compose, words)
        keys = [word.partition("=")[0].lstrip("+~") for word in words]
        is_named = (
            all(text in f"{said}$" for text in texts.split(" | "))
            if texts
            else any(key in said for key in keys)
        )
        if not is_named or "\n" in said or not is_split_rightly(said, words):
            wrong.append(f"{command}: {said}")
    assert wrong == []


@pytest.mark.slow
def test_every_good_command_is_accepted(compose: Compose) -> None:
    kinds = set()
    for line in commands("good_commands.txt"):
        command, _, note = line.partition(" # ")
        config = to_run_config(compose(words := words_of(command)))
        refuse_words_of_other_programs(words)
        kinds |= {part.kind for part in config.rewards.values()}
        if not note:
            refuse_unread_keys(config, words)
    assert kinds == set(KEYS_BY_KIND) == {*AnyRewardKind}
