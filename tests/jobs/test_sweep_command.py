"""Commands of sweeps: definitions by name, and the folders of a sweep and its jobs."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from rlhf.base.errors import ConfigError
from rlhf.config.choices import WandbMode
from rlhf.config.freeze import to_run_config
from rlhf.jobs.search_command import parse_search
from rlhf.jobs.sweep_command import (
    add_sweep_folders,
    expand_sweep,
    job_folder_name,
    jobs_at_a_time,
    sweep_folder_of,
    use_temporary_plan_folder,
)
from rlhf.run.metric_table import METRICS
from rlhf.run.wandb_run import SUMMARIES

ROOT = Path(__file__).parents[2]


@pytest.fixture
def definitions(tmp_path: Path) -> Path:
    text = "# What?\nppo.kl_ctl: [0.1, 0.2]\nppo.kl_target: [null, 6]\nlora: default\nplan: false\n"
    (tmp_path / "pets.yaml").write_text(text)
    (tmp_path / "list.yaml").write_text("- a\n")
    (tmp_path / "torn.yaml").write_text("a: [1\n")
    return tmp_path


def test_definition_takes_the_place_of_its_name(definitions: Path) -> None:
    defined = ["ppo.kl_ctl=0.1,0.2", "ppo.kl_target=null,6", "lora=default", "plan=false"]
    asked = expand_sweep(["-m", "sweep=pets", "seed=1,2"], definitions)
    assert asked == ["-m", *defined, "seed=1,2"], "flags do not come between overrides"
    assert expand_sweep(["sweep=pets", "-m"], definitions) == [*defined, "-m"]
    assert expand_sweep(["-m", "seed=1,2"], definitions) == ["-m", "seed=1,2"]


def test_a_mapping_keeps_each_of_its_values(definitions: Path) -> None:
    """A weight of 0 is not the default weight, and false not a default of true."""
    text = "rewards:\n- {gold: {kind: gold, weight: 0, retries: 0.0, quiet: false, words: []}}\n"
    (definitions / "judged.yaml").write_text(text)
    _, word = expand_sweep(["-m", "sweep=judged"], definitions)
    assert word == "rewards={gold: {kind: gold, weight: 0, retries: 0.0, quiet: false, words: []}}"


def test_command_wins_over_the_definition(definitions: Path) -> None:
    words = expand_sweep(["-m", "sweep=pets", "ppo.kl_ctl=0.5", "+lora=none"], definitions)
    assert words[:3] == ["-m", "ppo.kl_target=null,6", "plan=false"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["sweep=pets"], r"^sweep=pets is for several runs: python launch\.py -m sweep=pets$"),
        (["-m", "sweep=cats"], r"^sweep=cats: no such file in .*; choose one of list, pets, torn$"),
        (["-m", "sweep=list"], r"list\.yaml: must map keys to a value"),
        (["-m", "sweep=torn"], r"^sweep=torn: cannot be read \("),
    ],
)
def test_wrong_definition_is_refused(definitions: Path, words: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        expand_sweep(words, definitions)


def test_a_definition_that_reads_a_secret_is_refused(
    definitions: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (definitions / "pets.yaml").write_text("tracking.project: ['a', '${oc.env:MY_PASSWORD}']\n")
    assert expand_sweep(["-m", "sweep=pets"], definitions)
    monkeypatch.setenv("MY_PASSWORD", "correcthorsebattery")
    with pytest.raises(ConfigError, match=r"^tracking\.project=a,.* is or holds a key"):
        expand_sweep(["-m", "sweep=pets"], definitions)


def test_folders_are_named_by_the_command() -> None:
    words = ["-m", "experiment=dsc/opt_13b", "ppo.kl_ctl=0.1,0.2", "seed=1"]
    first, again, other = (
        add_sweep_folders(each, each) for each in (words, words[::-1], [*words[:-1], "seed=2"])
    )
    folder = next(word for word in first if word.startswith("hydra.sweep.dir="))
    assert folder.startswith("hydra.sweep.dir=runs/sweeps/dsc_opt_13b-")
    assert folder in again
    assert folder not in other
    assert "hydra.job.config.override_dirname.exclude_keys=[experiment,seed]" in first


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("003,ppo.kl_ctl=0.02", "003,ppo.kl_ctl=0.02"),
        ("003,model.path=a/b", "003,model.path=a_b-"),
        ("007,tracking.project=" + "x" * 400, "007,tracking.project=" + "x" * 170 + "-"),
        ("007,name=" + "\u00e4" * 400, "007,name=" + "\u00e4" * 91 + "-"),
    ],
)
def test_a_job_has_one_folder_that_file_systems_take(text: str, name: str) -> None:
    found = job_folder_name(text)
    assert found.startswith(name)
    assert "/" not in found
    assert len(found.encode()) <= 200
    assert found == text or found != job_folder_name(text + "y"), "the hash tells them apart"
    assert found.partition(",")[0].isdecimal(), "study.py reads the trial's number"


def test_hydra_names_folders_so() -> None:
    words = ["-m", "model.path=a/b,c/d"]
    (subdir,) = (w for w in add_sweep_folders(words, words) if w.startswith("hydra.sweep.subdir="))
    (override,) = OverridesParser.create().parse_overrides([subdir])  # as Hydra reads it
    text = str(override.value()).strip("'").replace("hydra.job.override_dirname", "name")
    node = OmegaConf.create({"name": "model.path=a/b", "dir": text})
    assert node.dir == job_folder_name("model.path=a/b")


def test_last_value_of_a_key_counts() -> None:
    words = ["-m", "seed=1", "ppo.steps=2", "seed=1,2"]
    found = add_sweep_folders(words, words)
    assert found[:3] == ["-m", "ppo.steps=2", "seed=1,2"]
    assert found[-1] == "hydra.job.config.override_dirname.exclude_keys=[ppo.steps]"


@pytest.mark.parametrize("words", [["seed=1,2"], ["-m", "seed=1"]])
def test_other_commands_keep_their_folders(words: list[str]) -> None:
    assert add_sweep_folders(words, words) == words


def test_a_folder_of_the_users_own_is_a_sweep_like_any_other() -> None:
    words = ["-m", "seed=1,2", "hydra.sweep.dir=/a/here"]
    found = add_sweep_folders(words, words)
    assert [word for word in found if word.startswith("hydra.sweep.dir=")] == words[2:]
    assert any(word.startswith("hydra.sweep.subdir=") for word in found)
    assert sweep_folder_of(found) == Path("/a/here")


def test_flags_and_their_values_are_no_overrides() -> None:
    words = ["-m", "--cfg", "job", "seed=1,2"]
    assert add_sweep_folders(words, words)[:4] == words


def test_flags_stand_beside_the_overrides_not_among_them(tmp_path: Path) -> None:
    for words in (["seed=1,2", "-m"], ["-m", "seed=1,2", "--cfg", "job"]):
        found = add_sweep_folders(words, words)
        start = found.index("seed=1,2")
        assert all("=" in word for word in found[start : start + 4]), found
        with use_temporary_plan_folder(["seed=1,2", "plan=only", "-m"]) as kept:
            assert kept[-2].startswith("hydra.sweep.dir=")


@pytest.mark.parametrize("path", sorted((ROOT / "sweeps" / "wandb").glob("*.yaml")), ids=str)
def test_sweep_of_weights_and_biases_starts_runs_that_compose(
    path: Path, compose: Callable[[list[str]], DictConfig]
) -> None:
    from wandb.sdk.launch.sweeps.utils import create_sweep_command, create_sweep_command_args

    sweep = yaml.safe_load(path.read_text())
    chosen = {key: {"value": space["min"]} for key, space in sweep["parameters"].items()}
    arguments = create_sweep_command_args({"args": chosen})["args_no_hyphens"]
    macros = {"${program}": [sweep["program"]], "${args_no_hyphens}": arguments}
    words = [part for word in sweep["command"] for part in macros.get(word, [word])]
    assert words[:2] == ["python", "launch.py"]
    assert create_sweep_command(sweep["command"])[0] == "python"
    config = to_run_config(compose(words[2:]))
    assert config.tracking.wandb is WandbMode.online
    metric = sweep["metric"]["name"].removesuffix(".max")
    assert metric in METRICS
    assert "max" in SUMMARIES[metric]


def test_jobs_stay_in_the_folder_of_their_sweep(tmp_path: Path) -> None:
    (tmp_path / "s.yaml").write_text("study: {trials: 1, minimize: [sft.loss]}\n")
    value = "data.path=../../../../a/b,c"
    with pytest.raises(ConfigError, match=r"^data\.path=\.\./.* in a sweep: .*an absolute path$"):
        add_sweep_folders(["-m", value], ["-m", value])
    with pytest.raises(ConfigError, match=r"^data\.path=\.\./.* in a sweep: .*an absolute path$"):
        parse_search(["-m", "sweep=s", value], tmp_path)
    assert (
        add_sweep_folders(["-m", "data.path=/a/b,c..d", "seed=1"], ["-m"])[1]
        == "data.path=/a/b,c..d"
    )


@pytest.mark.parametrize(
    ("words", "jobs"),
    [
        ([], 1),
        (["hydra/launcher=joblib"], len(os.sched_getaffinity(0))),
        (["hydra/launcher=joblib", "hydra.launcher.n_jobs=3"], 3),
        (["hydra/launcher=slurm"], None),
    ],
)
def test_jobs_at_a_time_are_those_of_the_launcher(
    words: list[str], jobs: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        cfg = hydra_compose("config", words, return_hydra_config=True)
    OmegaConf.update(cfg, "hydra.mode", RunMode.MULTIRUN)
    monkeypatch.setattr(HydraConfig.instance(), "cfg", OmegaConf.masked_copy(cfg, "hydra"))
    assert jobs_at_a_time() == jobs


def test_no_jobs_at_a_time_are_refused() -> None:
    words = ["-m", "seed=1,2", "hydra/launcher=joblib", "hydra.launcher.n_jobs=0"]
    with pytest.raises(ConfigError, match=r"^hydra\.launcher\.n_jobs=0: no job would run"):
        add_sweep_folders(words, words)
