"""Every file in conf/ composes, passes the checks, and explains its keys."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from rlhf.config.batches import batch_plans, num_ranks, rollout_plan
from rlhf.config.choices import Phase
from rlhf.config.freeze import load_frozen_config, write_frozen_config
from rlhf.config.hydra_errors import REWARD_MODEL_GROUP, schema_types
from rlhf.config.schema.run import RunConfig
from rlhf.config.typed import to_run_config
from tests.conf_headers import read_header
from tests.conftest import Compose

CONF = Path(__file__).parents[2] / "conf"
FILES = sorted(path for path in CONF.rglob("*.yaml") if path.parent != CONF)
HELP = CONF / "help.txt"
SCORERS = ("sft_model", "gold")  # of the group model, for the reward model only
TOGETHER = ("model", "sft", "reward", "dpo", "ppo", "data", "tracking", "launcher")
TOGETHER += ("hardware", "zero", "lora")
# Many ranks have no micro-batches for all batch sizes, and weights on NVMe no average.
ALONE = ("hardware=64xa100_80g", "zero=stage3_nvme")
SCRIPTS = "experiment=dsc/"  # test_recipes.py composes and checks them


def options_of(group: str) -> list[str]:
    """Names of the options of a group, those in its folders included."""
    below = CONF / group
    return [p.relative_to(below).with_suffix("").as_posix() for p in FILES if below in p.parents]


def defaults() -> dict[str, str | None]:
    """Group -> option, as conf/config.yaml chooses them; Hydra's own groups left out."""
    entries = OmegaConf.load(CONF / "config.yaml")["defaults"]
    pairs = (pair for entry in entries if not isinstance(entry, str) for pair in entry.items())
    return {group: option for group, option in pairs if not group.startswith(("override", "opt"))}


def choices() -> Iterator[list[str]]:
    """The commands at the top of all files in conf/; of models, as the reward model too."""
    for group in (group for group in defaults() if group != REWARD_MODEL_GROUP):
        for option in options_of(group):
            words = read_header(CONF / group / f"{option}.yaml").command.split()[2:]
            if group == "model" and option not in SCORERS:
                scorer = [word.replace("model", "reward_model", 1) for word in words]
                words += [f"{REWARD_MODEL_GROUP}={option}", *scorer[1:]]
            yield [word for word in words if word not in {"-m", "plan=only"} and "," not in word]


def commands() -> Iterator[list[str]]:
    """The choices, those of groups that restrict no other group joined: one option of each."""
    joined: list[list[str]] = []
    for words in choices():
        if words[0].startswith(SCRIPTS):
            continue
        group = words[0].partition("=")[0]
        if words[0] in ALONE or group not in {*TOGETHER, "model@reward_model"}:
            yield words
            continue
        keys = {word.partition("=")[0] for word in words}
        free = (each for each in joined if keys.isdisjoint(w.partition("=")[0] for w in each))
        if (command := next(free, None)) is None:
            joined.append(words)
        else:
            command += words
    yield from joined


@pytest.mark.slow
def test_every_option_composes_with_the_defaults(compose: Compose, tmp_path: Path) -> None:
    for overrides in commands():
        config = to_run_config(compose(overrides))
        name, _, option = overrides[0].partition("=")
        if name == "experiment":
            check_experiment(option, config)
        if name == "environment" or any(word.startswith("data=") for word in overrides):
            write_frozen_config(config, tmp_path)
            assert load_frozen_config(tmp_path) == config


def check_experiment(name: str, config: RunConfig) -> None:
    """It names itself, its batches divide over its ranks, and its command is its own."""
    path = CONF / "experiment" / f"{name}.yaml"
    assert config.experiment == name
    assert config.name == name.removeprefix("tables/").replace("/", "_")
    assert path.read_text().startswith("# @package _global_\n")
    for phase, plan in batch_plans(config).items():
        settings = getattr(config, phase)
        size = settings.mini_batch_size if phase is Phase.ppo else settings.batch_size
        assert plan.micro * plan.accumulation * num_ranks(config) == size
    if Phase.ppo in config.phase.order:
        assert rollout_plan(config).per_rank * num_ranks(config) == config.ppo.rollout_batch_size
    own = rf"python launch.py (-m )?(plan=only )?experiment={re.escape(name)}( .*)?"
    assert re.fullmatch(own, read_header(path).command)


def test_experiment_gives_way_to_the_command_line(compose: Compose) -> None:
    overrides = ["experiment=smoke", "ppo.steps=7", "model=opt_125m"]
    config = to_run_config(compose(overrides))
    assert (config.ppo.steps, config.model.path) == (7, "facebook/opt-125m")


@pytest.mark.parametrize(
    ("words", "correction"),
    [
        ([], "none"),
        (["rollout=vllm_server"], "token"),
        (["rollout=vllm_server", "ppo=vcpo"], "sequence"),
        (["rollout=vllm_server", "ppo.rollout_correction=none"], "none"),
    ],
)
def test_log_probs_of_a_server_are_corrected_by_default(
    words: list[str], correction: str, compose: Compose
) -> None:
    assert to_run_config(compose(words)).ppo.rollout_correction == correction


def test_every_group_is_chosen_in_the_defaults_list() -> None:
    folders = {path.relative_to(CONF).parts[0] for path in FILES}
    assert {group.split("@")[0] for group in defaults()} == folders - {"hydra", "base"}


def keys_of(node: Any, prefix: str = "") -> set[str]:
    """Dotted keys of everything below ``node``; free mappings count as one value."""
    free = schema_types().get(prefix.rstrip("."), None) == dict[str, Any]
    if not isinstance(node, dict) or free:
        return set()
    below = (keys_of(value, f"{prefix}{name}.") for name, value in node.items())
    return {f"{prefix}{name}" for name in node}.union(*below)


@pytest.mark.slow
def test_schema_and_yaml_have_the_same_keys(compose: Compose) -> None:
    assert keys_of(OmegaConf.to_container(compose([]))) == set(schema_types())


def test_every_file_says_what_it_is_for() -> None:
    for path in FILES:
        if path.relative_to(CONF).parts[0] in {"base", "hydra"}:
            lines = re.sub(r"^# @package \S+\n", "", path.read_text()).splitlines()
            assert re.match(r"# \S.*[.:;]", lines[0]), path
        else:
            header = read_header(path)
            assert header.title.endswith("."), path
            assert len(header.title) <= 120, path
            assert header.source is None or "http" in header.source, path


def helped() -> dict[str, list[str]]:
    """Group -> its options, as --help lists them."""
    groups = re.findall(r"^  (\S+): .*\n((?: {6}\S.*\n)+)", template(), flags=re.MULTILINE)
    return {group: re.findall(r"[^\s,]+(?: \(default\))?", options) for group, options in groups}


def template() -> str:
    """The text of --help."""
    return HELP.read_text()


def test_help_lists_every_group_with_every_option() -> None:
    chosen, shown = defaults(), helped()
    assert list(shown) == list(chosen)
    for group, options in shown.items():
        names = sorted(option.removesuffix(" (default)") for option in options)
        expected = options_of(group)
        if group == "experiment":
            expected = [name for name in expected if "/" not in name]
            for folder in {name.partition("/")[0] for name in options_of(group) if "/" in name}:
                count = sum(name.startswith(f"{folder}/") for name in options_of(group))
                assert f"{folder}/NAME ({count}: " in template()
        if group == "model":
            expected = [name for name in expected if name not in SCORERS]
        if group == REWARD_MODEL_GROUP:
            expected = sorted(SCORERS)  # "any model, or"
        assert names == expected, f"put the options of {group} into {HELP}"
        if chosen[group] is not None and len(options_of(group)) > 1:
            assert f"{chosen[group]} (default)" in options


def test_help_names_only_keys_that_exist() -> None:
    keys = re.findall(r"(?<![\w/.])((?:\w+)\.(?:\w+))\b(?!\()", template())
    groups = tuple(f"{group}." for group in schema_types())
    named = {key for key in keys if key.startswith(groups)}
    assert {"ppo.kl_ctl", "data.path"} <= named <= set(schema_types())
