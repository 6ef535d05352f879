"""A wrong name is answered with the right one."""

import pytest
from hydra import compose, initialize_config_dir
from hydra.errors import HydraException

from rlhf.config.hydra_errors import explain_hydra_error, nearest_name, to_hydra_override


def failure(overrides: list[str]) -> Exception:
    """What Hydra raises for these overrides."""
    with pytest.raises((HydraException, ValueError)) as caught:
        compose("config", overrides)
    return caught.value


SBATCH = "hydra.launcher.additional_parameters"


@pytest.mark.usefixtures("compose")
@pytest.mark.parametrize(
    ("chosen", "arguments", "message"),
    [
        ("model@reward_model=3", "-m model=tiny {} seed=1,2 --config-dir=a", "cannot choose {}:"),
        ("model=opt_1b", "-m model@reward_model=tiny,opt_1b", "unknown option model@reward_model="),
    ],
)
def test_only_the_wrong_one_of_several_words_is_named(
    chosen: str, arguments: str, message: str
) -> None:
    explained = explain_hydra_error(failure([chosen]), arguments.format(chosen).split())
    assert str(explained).startswith(message.format(chosen))


def test_a_near_name_is_found_in_any_case() -> None:
    assert nearest_name("fp-16", ["stage1", "FP16"]) == "FP16"
    assert nearest_name("zero", ["stage1", "FP16"]) is None


def test_unknown_primary_config() -> None:
    with initialize_config_dir("/", version_base="1.3"), pytest.raises(HydraException) as caught:
        compose("nothing", [])
    assert "'nothing'" in str(explain_hydra_error(caught.value, []))


@pytest.mark.parametrize("error", [ValueError("shapes differ"), KeyError("loss"), OSError("disk")])
def test_other_errors_are_not_explained(error: Exception) -> None:
    assert explain_hydra_error(error, ["zero=1"]) is None


@pytest.mark.parametrize(
    ("word", "read"),
    [
        ("resume=runs/sweeps/a/seed=1,x=2", "resume='runs/sweeps/a/seed=1,x=2'"),
        ("resume='runs/seed=1'", "resume='runs/seed=1'"),
        ("from_run=a,b", "from_run=a,b"),  # a sweep over two runs
        ("run_dir=", "run_dir="),
        ("data.path=a=b", "data.path=a=b"),
        ("hardware=4090", "hardware='4090'"),
        (f"{SBATCH}={{nice: 10}}", f"++{SBATCH}={{nice: 10}}"),
        (f"{SBATCH}.nice=10", f"++{SBATCH}.nice=10"),
        ("hydra.job.env_set={A: b}", "++hydra.job.env_set={A: b}"),
        ("hydra.job.name={A: b}", "hydra.job.name={A: b}"),
    ],
)
def test_values_that_hydra_reads_otherwise_are_rewritten(word: str, read: str) -> None:
    assert to_hydra_override(word) == read


def test_a_sweep_over_a_choice_names_the_flag() -> None:
    error = HydraException("Sweep parameters 'ppo.kl_ctl=choice(0.1,0.2)' requires --multirun")
    told = "ppo.kl_ctl=choice(0.1,0.2): for a run with each of these values, add -m"
    assert str(explain_hydra_error(error, [])) == told
