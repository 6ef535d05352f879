"""A wrong name is answered with the right one."""

from __future__ import annotations

import pytest
from hydra import compose, initialize_config_dir
from hydra.errors import HydraException

from rlhf.config.choices import KlEstimator
from rlhf.config.hydra_errors import (
    describe_type,
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


def test_every_type_of_the_schema_has_words() -> None:
    assert all(describe_type(kind) for kind in schema_types().values())


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
        (
            "weight_decay",
            "unknown key weight_decay; did you mean sft.weight_decay or "
            "reward.weight_decay or dpo.weight_decay or ppo.weight_decay?",
        ),
        ("model@reward_modl", "unknown key model@reward_modl; did you mean model@reward_model?"),
        ("qqq", "unknown key qqq"),
        ("ppo.kl_coef", "unknown key ppo.kl_coef; did you mean ppo.kl_ctl?"),
        ("kl_coef", "unknown key kl_coef; did you mean ppo.kl_ctl?"),
        ("ppo.init_kl_coef", "unknown key ppo.init_kl_coef; did you mean ppo.kl_ctl?"),
        ("ppo.beta", "unknown key ppo.beta; did you mean ppo.kl_ctl?"),
        ("ppo.lr", "unknown key ppo.lr; did you mean ppo.actor_lr or ppo.critic_lr?"),
        (
            "ppo.learning_rate",
            "unknown key ppo.learning_rate; did you mean ppo.actor_lr or ppo.critic_lr?",
        ),
        ("sft.learning_rate", "unknown key sft.learning_rate; did you mean sft.lr?"),
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
        ("hardware.fp16", "unknown key hardware.fp16; did you mean hardware.dtype=fp16?"),
        ("zero.extra.a", "unknown key zero.extra.a; to add a new key, write +zero.extra.a=VALUE"),
        (
            "zero.extra.a.b",
            "unknown key zero.extra.a.b; to add a new key, write +zero.extra.a.b=VALUE",
        ),
    ],
)
def test_unknown_key(key: str, message: str) -> None:
    assert str(unknown_key_error(key)) == message


def failure(overrides: list[str]) -> Exception:
    """What Hydra raises for these overrides."""
    with pytest.raises((HydraException, ValueError)) as caught:
        compose("config", overrides)
    return caught.value


@pytest.mark.slow
@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("ppo.cliprang=1", "unknown key ppo.cliprang; did you mean ppo.cliprange?"),
        ("phas=ppo", "unknown key phas; did you mean phase?"),
        ("ppo.steps.x=1", "unknown key ppo.steps.x; did you mean ppo.steps?"),
        (
            "model.architecture.hidden_sizes=8",
            "unknown key model.architecture.hidden_sizes; to add a new key, write "
            "+model.architecture.hidden_sizes=VALUE; did you mean hidden_size?",
        ),
        ("model@reward=tiny", "unknown key model@reward; did you mean model@reward_model?"),
        ("hydra.jobb=1", "unknown key hydra.jobb"),
        ("zero=1", "cannot choose zero=1: a group takes the name of one of its options, see"),
        ("~phase=-1", "cannot choose ~phase=-1: a group takes the name of one of its options"),
        ("model=null", "cannot choose model=null: a group takes the name of one of its options"),
        ("zero", "cannot read zero: missing EQUAL at '<EOF>'; write key=value"),
        (
            "data.path=[a",
            "cannot read data.path=[a: no viable alternative at input '[a'; to pass",
        ),
        ("run_dir=~/a", """cannot read run_dir=~/a; to pass text, write "run_dir='~/a'\""""),
        (
            "+zero=stage1",
            "Multiple values for zero. To override a value use 'override zero: stage1'",
        ),
        ("+seed=2", "Could not append to config. An item is already at 'seed'."),
        ("~sed", "Could not delete from config. 'sed' does not exist."),
        ("name='${a'", "Error merging override name='${a': "),
        ("hydra.run=3", "Error merging override hydra.run=3: "),
    ],
)
@pytest.mark.usefixtures("compose")
def test_hydra_error_becomes_one_line(override: str, message: str) -> None:
    explained = str(explain_hydra_error(failure([override]), [override]))
    assert explained.startswith(message)
    assert "\n" not in explained


@pytest.mark.parametrize(
    ("override", "wrong", "suggestion"),
    [
        (
            "zero=stag1",
            "zero=stag1; options: auto, stage0, stage1, stage2, stage2_offload, ",
            "stage1",
        ),
        ("model@reward_model=opt125m", "model@reward_model=opt125m; options: ", "opt_125m"),
        ("experiment=smok", "experiment=smok; options: ", "smoke"),
        ("hydra/help=rlh", "hydra/help=rlh; options: default, rlhf", "rlhf"),
    ],
)
@pytest.mark.usefixtures("compose")
def test_unknown_option(override: str, wrong: str, suggestion: str) -> None:
    explained = str(explain_hydra_error(failure([override]), ["seed=1", override]))
    assert explained.startswith(f"unknown option {wrong}")
    assert explained.endswith(f"; did you mean {suggestion}?")


@pytest.mark.parametrize(
    ("override", "way_out"),
    [
        ("model=org/name", "model=pretrained model.path=org/name"),
        ("model=/data/name", "model=pretrained model.path=/data/name"),
        (
            "model@reward_model=org/name",
            "model@reward_model=pretrained reward_model.path=org/name",
        ),
        ("data=/data/my.jsonl", "data=local data.path=/data/my.jsonl"),
        ("data=my.jsonl", "data=local data.path=my.jsonl"),
        ("data=org/name", "data=hub data.path=org/name"),
    ],
)
@pytest.mark.usefixtures("compose")
def test_a_model_or_data_named_by_its_path_is_no_option(override: str, way_out: str) -> None:
    explained = str(explain_hydra_error(failure([override]), [override]))
    what = "a model of the hub or a folder" if "model" in override else "data of your own"
    assert explained == f"unknown option {override}; to use {what}, write {way_out}"


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


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("rtx4090", "hardware=rtx_4090_24g"),
        ("4090", "hardware=rtx_4090_24g"),
        ("NVIDIA-L4-24GB", "hardware=l4_24g"),
        ("l40s", "hardware=l40s_48g"),
        ("h200", "hardware=h200_141g"),
        ("A100", "hardware=a100_40g or hardware=a100_80g"),
        ("8xA100-80GB", "hardware=8xa100_80g"),
        ("2x3090", "hardware=rtx_3090_24g hardware.ranks_per_node=2"),
    ],
)
@pytest.mark.usefixtures("compose")
def test_a_card_is_known_by_its_common_name(typed: str, meant: str) -> None:
    word = to_hydra_override(f"hardware={typed}")
    assert f"v100_32g; did you mean {meant}?; for" in str(
        explain_hydra_error(failure([word]), [word])
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
