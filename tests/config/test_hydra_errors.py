"""A wrong name is answered with the right one."""

import pytest
from hydra import compose, initialize_config_dir
from hydra.errors import HydraException

from rlhf.config.choices import KlEstimator
from rlhf.config.hydra_errors import (
    explain_hydra_error,
    nearest_name,
    schema_types,
    to_hydra_override,
    unknown_key_error,
)
from rlhf.options import PpoConfig


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("stage9", "stage1"),
        ("STAGE1", "stage1"),
        ("offload", "stage1_offload"),
        ("fp-16", "FP16"),
        ("zero", None),
        ("stge1_ofload", "stage1_offload"),
    ],
)
def test_nearest(name: str, expected: str | None) -> None:
    assert nearest_name(name, ["stage1", "stage1_offload", "FP16"]) == expected


def test_schema_types_hold_groups_and_inherited_keys() -> None:
    types = schema_types()
    assert types["ppo"] is PpoConfig
    assert types["ppo.kl_estimator"] is KlEstimator
    assert types["sft.lr"] is float
    assert types["model.path"] == types["reward_model.path"] == str | None


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("ppo.cliprang", "unknown key ppo.cliprang; did you mean ppo.cliprange?"),
        ("phas", "unknown key phas; did you mean phase?"),
        ("cliprange", "unknown key cliprange; did you mean ppo.cliprange?"),
        (
            "lr",
            "unknown key lr; did you mean sft.lr or reward.lr or dpo.lr or ppo.actor_lr or "
            "ppo.critic_lr?",
        ),
        ("model@reward_modl", "unknown key model@reward_modl; did you mean model@reward_model?"),
        ("ppo.kl_coef", "unknown key ppo.kl_coef; did you mean ppo.kl_ctl?"),
        ("ppo.lr", "unknown key ppo.lr; did you mean ppo.actor_lr or ppo.critic_lr?"),
        (
            "ppo.batch_size",
            "unknown key ppo.batch_size; did you mean ppo.mini_batch_size or "
            "ppo.rollout_batch_size?",
        ),
        ("ppo.group_size", "unknown key ppo.group_size; did you mean ppo.responses_per_prompt?"),
        (
            "algorithm",
            "unknown key algorithm; did you mean experiment=grpo or ppo.advantage_estimator=VALUE?",
        ),
        ("precision", "unknown key precision; did you mean hardware.dtype?"),
        ("bf16", "unknown key bf16; did you mean hardware.dtype=bf16?"),
        ("zero.extra.a", "unknown key zero.extra.a; to add a new key, write +zero.extra.a=VALUE"),
    ],
)
def test_unknown_key(key: str, message: str) -> None:
    assert str(unknown_key_error(key)) == message


def failure(overrides: list[str]) -> Exception:
    """What Hydra raises for these overrides."""
    with pytest.raises((HydraException, ValueError)) as caught:
        compose("config", overrides)
    return caught.value


@pytest.mark.usefixtures("compose")
def test_all_phases_are_the_pipeline() -> None:
    explained = str(explain_hydra_error(failure(["phase=rlhf"]), ["phase=rlhf"]))
    assert explained.endswith("; pipeline is all three: sft, reward and ppo")


@pytest.mark.usefixtures("compose")
def test_an_unknown_machine_can_be_described() -> None:
    explained = str(explain_hydra_error(failure(["hardware=rtx9999"]), ["hardware=rtx9999"]))
    assert explained.endswith(
        "v100_32g; for another machine, copy conf/hardware/template.yaml to "
        "conf/hardware/rtx9999.yaml and fill in the machine's figures"
    )


@pytest.mark.usefixtures("compose")
def test_only_the_group_with_a_number_is_named() -> None:
    error = failure(["model@reward_model=3"])
    arguments = ["-m", "model=tiny", "model@reward_model=3", "seed=1,2", "--config-dir=a"]
    assert str(explain_hydra_error(error, arguments)).startswith(
        "cannot choose model@reward_model=3: a group"
    )


@pytest.mark.usefixtures("compose")
def test_unknown_option_is_found_among_the_values_of_a_sweep() -> None:
    explained = str(
        explain_hydra_error(failure(["model=opt_1b"]), ["-m", "model@reward_model=tiny,opt_1b"])
    )
    assert explained.startswith("unknown option model@reward_model=opt_1b; options: ")


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
    ],
)
def test_values_that_hydra_reads_otherwise_are_quoted(word: str, read: str) -> None:
    assert to_hydra_override(word) == read
