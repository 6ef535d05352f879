"""Names of TRL, trlx, OpenRLHF, verl and DeepSpeed-Chat lead to keys that exist."""

from pathlib import Path

import pytest

from rlhf.base.errors import ConfigError
from rlhf.base.packaged_yaml import read_yaml_beside
from rlhf.config.hydra_errors import (
    own_keys_by_foreign_key,
    refuse_unknown_flags,
    schema_types,
    suggested_keys,
    type_of_key,
    unknown_key_error,
)
from tests.needs_lab import needs_lab

ROOT = Path(__file__).parents[2]
CONF = ROOT / "conf"

MEANT: dict[str, dict[str, str]] = read_yaml_beside(__file__, "other_names.yaml")


@pytest.mark.parametrize(("name", "meant"), MEANT["keys"].items())
def test_name_leads_to_our_key(name: str, meant: str) -> None:
    assert str(unknown_key_error(name)) == f"unknown key {name}; did you mean {meant}?"


def exists(words: str) -> bool:
    """True if each word is a key, or an option of a group, with a value that can be one."""
    return all(map(is_word, words.split()))


def is_word(word: str) -> bool:
    """True for KEY, KEY=VALUE, GROUP=OPTION and GROUP=NAME."""
    key, _, value = word.partition("=")
    group = CONF / key.partition("@")[0]
    if group.is_dir():
        return value in {"NAME", "stageN"} or (group / f"{value}.yaml").is_file()
    try:
        return type_of_key(key) is not None
    except KeyError:
        return False


@needs_lab
def test_every_proposal_of_the_table_exists() -> None:
    assert [
        each for found in own_keys_by_foreign_key().values() for each in found if not exists(each)
    ] == []
    assert not exists("ppo.kl_coef")
    assert not exists("rewards.NAME.weights")
    assert not exists("lora=rank8")


@needs_lab
def test_every_name_of_the_table_is_answered_with_keys_of_the_group() -> None:
    names = [f"ppo.{name}" for name in own_keys_by_foreign_key()]
    assert len(names) >= 419, "people type these names"
    keys = schema_types()
    found = {name: suggested_keys(name, keys) for name in names if name not in keys}
    assert [name for name, each in found.items() if not each or not all(map(exists, each))] == []


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--kl_coef 0.1", "--kl_coef: keys are .*; did you mean ppo.kl_ctl=0.1[?]"),
        ("-m seed=1,2 --zero-stage=2", "--zero-stage: keys are .*; did you mean zero=stage2[?]"),
        ("--ema_beta --seed 3", "--ema_beta: keys are .*; did you mean ppo.ema_beta=VALUE[?]"),
        ("--model gpt2", ".*; did you mean model=NAME or model=pretrained model.path=gpt2[?]"),
        ("--lora_rank 8", ".*; did you mean lora=default lora.rank=8[?]"),
        ("--deepspeed_config ds.json", "--deepspeed_config.* zero="),
        ("--qqq", "--qqq: keys are written key=value, without dashes$"),
    ],
)
def test_flag_is_answered_with_an_override(words: str, message: str) -> None:
    with pytest.raises(ConfigError, match=f"^unknown option {message}"):
        refuse_unknown_flags(words.split())


def test_keys_behind_a_flag_that_follows_keys_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"^seed=1,2: keys cannot .* put the flags first"):
        refuse_unknown_flags(["name=a", "-m", "seed=1,2"])


@pytest.mark.parametrize(
    "words",
    "-m seed=1,2|--cfg job|--help|-sc install=bash|data.x=--a|~seed|--config-dir /a".split("|"),
)
def test_options_of_hydra_and_keys_are_no_flags(words: str) -> None:
    refuse_unknown_flags(words.split())
