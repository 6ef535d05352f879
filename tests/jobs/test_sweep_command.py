"""Commands of sweeps: definitions by name, and the folders of a sweep and its jobs."""

import os
from pathlib import Path

import pytest
from hydra import compose as hydra_compose
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.types import RunMode
from omegaconf import OmegaConf

from rlhf.base.errors import ConfigError
from rlhf.config.hydra_parts import composing
from rlhf.jobs.launch_command import parse_command
from rlhf.jobs.sweep_command import (
    add_sweep_folders,
    expand_sweep,
    job_folder_name,
    jobs_at_a_time,
    sweep_folder_of,
    use_temporary_plan_folder,
)

ROOT = Path(__file__).parents[2]
BAD = Path(__file__).with_name("bad_sweeps.txt").read_text().splitlines()
STUDY = "study: {trials: 4, maximize: [ppo.gold_after]}"


@pytest.fixture
def definitions(tmp_path: Path) -> Path:
    text = "# What?\nppo.kl_ctl: [0.1, 0.2]\nppo.kl_target: [null, 6]\nlora: default\nplan: false\n"
    (tmp_path / "pets.yaml").write_text(text)
    (tmp_path / "list.yaml").write_text("- a\n")
    (tmp_path / "torn.yaml").write_text("a: [1\n")
    (tmp_path / "deep.yaml").write_text("[" * 5000)
    (tmp_path / "latin.yaml").write_bytes(b"a: \xe9")
    text = "seeds: 2\nminutes: 30\nphase: sft\ngrid: {sft.epochs: [1, 2]}\n"
    text += "zip:\n  model: [tiny, opt_125m]\n  sft.batch_size: [16, 8]\n"
    (tmp_path / "pairs.yaml").write_text(text)
    return tmp_path


def folders_of(words: list[str], definitions: Path) -> str:
    new, growing = expand_sweep(words, definitions)
    found = add_sweep_folders(new, words, growing)
    return next(word for word in found if word.startswith("hydra.sweep.dir="))


PETS = ["ppo.kl_ctl=0.1,0.2", "ppo.kl_target=null,6", "lora=default", "plan=false"]
# A weight of 0 is not the default weight, and false not a default of true.
MAPPING = "{gold: {kind: gold, weight: 0, retries: 0.0, quiet: false, words: []}}"


GRID = ["sft.epochs=1,2", "model=tiny,opt_125m"]
MINUTES = "hydra.sweeper.minutes=30.0"
PAIRED = "hydra.sweeper.paired=[[model,sft.batch_size]]"
GROWING = {"seed", "sft.epochs", "model", "sft.batch_size"}


@pytest.mark.parametrize(
    ("words", "expected", "growing"),
    [
        ("-m sweep=pets seed=1,2", ["-m", *PETS, "seed=1,2"], set()),  # no flag between overrides
        ("sweep=pets -m", [*PETS, "-m"], set()),
        ("-m seed=1,2", ["-m", "seed=1,2"], set()),
        (
            "-m sweep=pets ppo.kl_ctl=0.5 +lora=none",  # the command wins
            ["-m", PETS[1], PETS[3], "ppo.kl_ctl=0.5", "+lora=none"],
            set(),
        ),
        ("-m sweep=pets seeds=2", ["-m", *PETS, "seed=range(1,3)"], {"seed"}),
        ("-m sweep=judged", ["-m", f"rewards={MAPPING}"], set()),
        (
            "-m sweep=pairs",  # which has words for pairs, seeds and a cap
            ["-m", "seed=range(1,3)", MINUTES, "phase=sft", *GRID, "sft.batch_size=16,8", PAIRED],
            GROWING,
        ),
        (
            "-m sweep=pairs seeds=5 minutes=90 sft.batch_size=4 dollars=2",
            [
                *("-m", "phase=sft", *GRID, "hydra.sweeper.paired=[[model]]", "seed=range(1,6)"),
                *("hydra.sweeper.minutes=90.0", "sft.batch_size=4", "hydra.sweeper.dollars=2.0"),
            ],
            GROWING - {"sft.batch_size"},
        ),
        (
            "-m sweep=pairs seed=7",
            ["-m", MINUTES, "phase=sft", *GRID, "sft.batch_size=16,8", PAIRED, "seed=7"],
            GROWING - {"seed"},
        ),
    ],
)
def test_a_definition_takes_the_place_of_its_name(
    words: str, expected: list[str], growing: set[str], definitions: Path
) -> None:
    (definitions / "judged.yaml").write_text(f"rewards:\n- {MAPPING}\n")
    assert expand_sweep(words.split(), definitions) == (expected, growing)


def test_folders_of_sweeps_that_have_begun_stay(definitions: Path) -> None:
    begun = ["-m", "experiment=smoke", "ppo.kl_ctl=0.05,0.5", "ppo.cliprange=0.1,0.3", "seed=1,2"]
    for words, name in (
        (["-m", "sweep=kl_frontier"], "kl_frontier-be578880"),
        (begun, "smoke-034b5895"),
    ):
        assert folders_of(words, ROOT / "sweeps") == f"hydra.sweep.dir=runs/sweeps/{name}"
        capped = folders_of([*words, "minutes=9"], ROOT / "sweeps")
        assert capped == f"hydra.sweep.dir=runs/sweeps/{name}", "another cap continues it"


def test_more_values_continue_a_sweep_in_its_folder(definitions: Path) -> None:
    folder = folders_of(["-m", "sweep=pairs"], definitions)
    assert folders_of(["-m", "sweep=pairs", "seeds=9", "minutes=60"], definitions) == folder
    file = definitions / "pairs.yaml"
    before = file.read_text()
    file.write_text(before.replace("[1, 2]", "[1, 2, 4]").replace("16, 8]", "16, 4]"))
    assert folders_of(["-m", "sweep=pairs"], definitions) == folder
    file.write_text(before.replace("[1, 2]", "[1]"))
    assert folders_of(["-m", "sweep=pairs"], definitions) == folder
    for old, new in (
        ("phase: sft", "phase: reward"),
        ("sft.epochs", "sft.lr"),
        ("grid: {sft.epochs: [1, 2]}\nzip:", "zip:\n  sft.epochs: [1, 2]"),
    ):
        file.write_text(before.replace(old, new))
        assert folders_of(["-m", "sweep=pairs"], definitions) != folder, new
    words = ["-m", "ppo.kl_ctl=0.1,0.2"]
    assert folders_of([*words, "seeds=2"], definitions) == folders_of(
        [*words, "seeds=3"], definitions
    )
    assert folders_of([*words, "seeds=2"], definitions) != folders_of(words, definitions)


def test_one_value_that_may_get_company_names_folders_too(definitions: Path) -> None:
    (definitions / "pairs.yaml").write_text("phase: sft\ngrid: {sft.epochs: [1]}\n")
    typed = ["-m", "sweep=pairs"]
    words, growing = expand_sweep(typed, definitions)
    found = add_sweep_folders(words, typed, growing)
    assert found[-1] == "hydra.job.config.override_dirname.exclude_keys=[phase]"


@pytest.mark.parametrize("line", [each for each in BAD if not each.startswith("# ")])
def test_a_sweep_or_search_that_means_nothing_is_refused(line: str, definitions: Path) -> None:
    words, message, *text = line.replace("LONG", "x" * 300).split(" # ")
    content = "".join(text).replace("STUDY", STUDY).replace("\\n", "\n")
    (definitions / "mine.yaml").write_text(content)
    with (
        pytest.raises(ConfigError, match=f"^{message}"),
        parse_command(words.split(), definitions, leads=True),
    ):
        pass


def test_a_definition_that_reads_a_secret_is_refused(
    definitions: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (definitions / "pets.yaml").write_text("tracking.project: ['a', '${oc.env:MY_PASSWORD}']\n")
    expand_sweep(["-m", "sweep=pets"], definitions)
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


@pytest.mark.parametrize(
    ("words", "begins", "last"),
    [
        (["seed=1,2"], ["seed=1,2"], "seed=1,2"),  # no sweep
        (["-m", "seed=1"], ["-m", "seed=1"], "hydra/sweeper=jobs"),
        (
            ["-m", "seed=1", "ppo.steps=2", "seed=1,2"],
            ["-m", "ppo.steps=2", "seed=1,2"],  # the last value of a key counts
            "hydra.job.config.override_dirname.exclude_keys=[ppo.steps]",
        ),
        (
            ["-m", "--cfg", "job", "seed=1,2"],
            ["-m", "--cfg", "job", "seed=1,2"],  # the value of a flag is no override
            "hydra.job.config.override_dirname.exclude_keys=[]",
        ),
    ],
)
def test_overrides_are_added_to_a_sweep(words: list[str], begins: list[str], last: str) -> None:
    found = add_sweep_folders(words, words)
    assert found[: len(begins)] == begins
    assert found[-1] == last


def test_a_folder_of_the_users_own_is_a_sweep_like_any_other() -> None:
    words = ["-m", "seed=1,2", "hydra.sweep.dir=/a/here"]
    found = add_sweep_folders(words, words)
    assert [word for word in found if word.startswith("hydra.sweep.dir=")] == words[2:]
    assert any(word.startswith("hydra.sweep.subdir=") for word in found)
    assert sweep_folder_of(found) == Path("/a/here")


def test_flags_stand_beside_the_overrides_not_among_them(tmp_path: Path) -> None:
    for words in (["seed=1,2", "-m"], ["-m", "seed=1,2", "--cfg", "job"]):
        found = add_sweep_folders(words, words)
        start = found.index("seed=1,2")
        assert all("=" in word for word in found[start : start + 4]), found
        with use_temporary_plan_folder(["seed=1,2", "plan=only", "-m"]) as kept:
            assert kept[-2].startswith("hydra.sweep.dir=")


def test_two_dots_within_a_name_lead_nowhere() -> None:
    words = ["-m", "data.path=/a/b,c..d", "seed=1"]
    assert add_sweep_folders(words, ["-m"])[:2] == words[:2]


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
    with composing(ROOT / "conf"):
        cfg = hydra_compose("config", words, return_hydra_config=True)
    OmegaConf.update(cfg, "hydra.mode", RunMode.MULTIRUN)
    monkeypatch.setattr(HydraConfig.instance(), "cfg", OmegaConf.masked_copy(cfg, "hydra"))
    assert jobs_at_a_time() == jobs
