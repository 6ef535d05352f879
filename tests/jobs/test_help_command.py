"""``--help WORD`` prints every key, option and metric, with what schema, conf/ and table say."""

import re
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import get_type_hints

import pytest
from hydra import compose

from rlhf.base.errors import ConfigError
from rlhf.base.packaged_yaml import read_yaml_beside
from rlhf.config.hydra_errors import schema_types
from rlhf.config.hydra_parts import composing
from rlhf.config.schema.data import DatasetConfig
from rlhf.config.schema.rewards import RewardTerm
from rlhf.config.schema.run import RunConfig
from rlhf.config.typed import to_run_config
from rlhf.jobs import launch_command
from rlhf.jobs.launch_command import matching_names, print_help
from rlhf.methods import conf_folders
from rlhf.run import metric_table
from rlhf.run.metric_table import METRICS, OTHER_NAMES
from tests.needs_lab import needs_lab

CONF = Path(__file__).parents[2] / "conf"


@pytest.fixture(scope="module")
def keys() -> dict[str, str]:
    """The entry of every key, with the values of the default run."""
    with composing(CONF):
        config = to_run_config(compose("config"))
    return dict(launch_command._describe_keys(RunConfig, config, config))


def asked(*words: str) -> None:
    """Print what the words ask for; the process would end with exit code 0."""
    with pytest.raises(SystemExit) as end:
        print_help(["--help", *words], CONF)
    assert end.value.code == 0


def test_every_key_has_an_entry_that_explains_it(keys: dict[str, str]) -> None:
    groups = {name for name, kind in schema_types().items() if is_dataclass(kind)}
    of_sets = {f"data.sets.NAME.{each.name}" for each in fields(DatasetConfig)}
    of_parts = {f"rewards.NAME.{each.name}" for each in fields(RewardTerm)}
    assert keys.keys() == schema_types().keys() - groups | of_sets | of_parts
    assert not [name for name, entry in keys.items() if not entry.partition("\n")[2].strip()]


def test_every_option_has_a_title() -> None:
    options = dict(launch_command._describe_group_options(CONF))
    groups = {name for name in get_type_hints(RunConfig) if (CONF / name).is_dir()}
    named = {name.partition("=")[0] for name in options}
    assert named == groups | {"experiment", "sweep"} - {"reward_model"}
    assert "experiment=dsc/opt_13b" in options
    untitled = {name for name, entry in options.items() if not entry.partition("\n")[0].strip()}
    assert not untitled


@pytest.mark.parametrize(
    ("key", "entry"),
    [
        (
            "ppo.gamma",
            " = 1.0  (a number, above 0 and at most 1; affects ppo; a resumed run keeps it)\n"
            "Discount per token.",
        ),
        ("seed", " = 1  (a whole number, 0 or more; affects dpo, ppo, reward, sft; a resumed run"),
        ("data.split", " = [7.0,28.0,2.0]  (a list, each item a number; affects dpo"),
        ("hardware.device", " = cpu  (one of cpu, cuda; affects"),
        ("sft.lr", " = 0.003  (a number, above 0; affects sft;"),
        ("ppo.cliprange_value", " = null  (a number or null, above 0; affects ppo;"),
        ("run_dir", " = null  (text or null; affects no phase; a resumed run keeps it)"),
        (
            "checkpoint.most_skipped",
            " = 20  (a whole number or null, above 0; affects no phase; a resumed run may",
        ),
        ("rewards.NAME.columns", "  (a list, each item text; affects ppo;"),
        ("data.sets.NAME.path", "  (text; affects dpo"),
    ],
)
def test_entry_by_hand(key: str, entry: str, keys: dict[str, str]) -> None:
    assert keys[key].startswith(entry)


def test_a_metric_and_a_group_of_options(capsys: pytest.CaptureFixture[str]) -> None:
    asked("ppo/clipfrac", "ppo=")
    metric, *rest = re.split(r"^ppo=", capsys.readouterr().out, flags=re.MULTILINE)
    assert METRICS["ppo/clipfrac"].healthy in " ".join(metric.split())
    folders = [CONF, *conf_folders()]
    assert len(rest) == sum(len([*folder.glob("ppo/*.yaml")]) for folder in folders)
    assert all(option.count("\n") == 1 for option in rest)


def test_names_match_by_beginning_then_by_part() -> None:
    names = ["ppo.kl_ctl", "ppo.kl_target", "ppo/kl_ctl", "sft.lr"]
    assert matching_names("ppo.kl_ctl", names) == ["ppo.kl_ctl"]
    assert matching_names("ppo.", names) == ["ppo.kl_ctl", "ppo.kl_target"]
    assert matching_names("kl_ctl", names) == ["ppo.kl_ctl", "ppo/kl_ctl"]
    with pytest.raises(ConfigError, match=r"sft\.lz.*did you mean sft\.lr"):
        matching_names("sft.lz", names)


@needs_lab
def test_without_a_word_the_whole_help_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match=r"^0$"):
        print_help(["-m", "--help"], CONF)
    text, last = capsys.readouterr().out.rstrip("\n").rsplit("\n", 1)
    assert CONF.joinpath("help.txt").read_text() == f"{text}\n"
    assert last.startswith("Of installed methods: ppo=dapo, ppo=deepseek_v32")


def test_without_help_nothing_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    print_help(["ppo.kl_ctl"], CONF)
    assert capsys.readouterr().out == ""


# The values are those of the command's other words.
@pytest.mark.parametrize(
    ("words", "begins"),
    [
        ("experiment=grpo", "experiment=grpo  Group-relative advantages"),
        ("model@reward_model=opt_125m", "model=opt_125m  "),
        ("ppo.kl_ctl=0.5", "ppo.kl_ctl = 0.5  (a number, 0 or more; "),
        ("ppo.kl_ctl experiment=grpo", "ppo.kl_ctl = 0.25  (a number, 0 or more; "),
        ("sweep=clip_range", "sweep=clip_range  Does the clip range matter"),
        ("data=local data.split", "data.split = [2.0,4.0,4.0]  "),
        ("objective/kl", "objective/kl of another program is called here:\nppo/kl_to_reference  ("),
        ("kl_coef", "kl_coef of another program is called here:\nppo.kl_ctl = 0.28  ("),
        ("gpu-check ppo.gamma", "python -m rlhf.gpu_check --help explains a tool\nppo.gamma = "),
    ],
)
def test_what_is_typed_alone_is_explained(
    words: str, begins: str, capsys: pytest.CaptureFixture[str]
) -> None:
    asked(*words.split())
    assert capsys.readouterr().out.startswith(begins)


def test_names_beside_a_wrong_one_are_explained(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match=r"^--help ppo.gama: .*did you mean ppo\.gamma"):
        print_help(["--help", "ppo.gama", "seed"], CONF)
    assert capsys.readouterr().out.startswith("seed = 1  ")
    with pytest.raises(ConfigError, match=r"^verify: .* write python -m rlhf_lab\.verify"):
        print_help(["--help", "verify"], CONF)


def test_metrics_of_other_programs_are_metrics_here() -> None:
    """Each name once, none of them ours; the table in docs/elsewhere.md has the same meanings."""
    assert set(OTHER_NAMES.values()) <= METRICS.keys()
    assert not OTHER_NAMES.keys() & METRICS.keys()
    listed = read_yaml_beside(metric_table.__file__, "other_metrics.yaml")
    assert len(OTHER_NAMES) == sum(map(len, listed.values()))
    page = (CONF.parent / "docs/elsewhere.md").read_text()
    rows = re.findall(r"^\| `([^|]+)` \|(.+)\| `([a-z_]+/[a-z_]+)` \|", page, re.MULTILINE)
    assert len(rows) >= 10
    for first, rest, ours in rows:
        for name in [first, *re.findall("`([^`]+)`", rest)]:
            for each in name.split("`, `"):
                assert OTHER_NAMES[each] == ours, each
