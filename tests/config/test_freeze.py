"""From a composed configuration to typed dataclasses, to a file, and back."""

import re
from dataclasses import replace
from enum import Enum
from pathlib import Path

import pytest
from omegaconf import DictConfig, OmegaConf

from rlhf.base.errors import ConfigError
from rlhf.config.freeze import (
    FROZEN,
    apply_resume_overrides,
    load_frozen_config,
    load_run,
    write_frozen_config,
)
from rlhf.config.typed import flatten_keys, to_run_config, values_by_key
from tests.conftest import Compose
from tests.needs_lab import needs_lab


def test_cache_directory_comes_from_the_environment(
    compose: Compose, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RLHF_CACHE")
    assert to_run_config(compose([])).data.cache_dir == "~/.cache/rlhf"
    monkeypatch.setenv("RLHF_CACHE", "/big/disk")
    assert to_run_config(compose([])).data.cache_dir == "/big/disk"


def test_reference_to_nothing_is_refused(compose: Compose) -> None:
    cfg = compose([])
    cfg.ppo.actor_lr = "${ppo.lr}"
    with pytest.raises(ConfigError, match=r"^ppo\.actor_lr: .*key 'ppo.lr' not found"):
        to_run_config(cfg)


@pytest.mark.slow
@pytest.mark.parametrize(
    "overrides",
    [
        ["experiment=smoke", "+zero.extra.zero_optimization.overlap_comm=true"],
        ["data=local", "data.path=[a,b]", "ppo.kl_target=6", "tracking.tags=[x]", "sft.lr=1e-7"],
        ["name='12'", "data=hub", "data.path='1e-5'"],
    ],
)
def test_frozen_config_reads_back_equal(
    overrides: list[str], compose: Compose, tmp_path: Path
) -> None:
    config = to_run_config(compose(overrides))
    write_frozen_config(config, tmp_path)
    assert load_frozen_config(tmp_path) == config
    assert load_run(tmp_path) == load_run(str(tmp_path)) == replace(config, run_dir=str(tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == [FROZEN]


@needs_lab
def test_values_by_key_are_those_of_the_file(compose: Compose, tmp_path: Path) -> None:
    words = [
        "phase=pipeline_rule",
        "lora=default",
        "+rewards.mine={kind: exact, columns: [answer]}",
    ]
    words += ["data=local", "data.path=null", "+data.sets.mine={path: a, phases: [sft, ppo]}"]
    config = to_run_config(compose(words))
    write_frozen_config(config, tmp_path)
    stored = OmegaConf.to_container(OmegaConf.load(tmp_path / FROZEN))
    found = values_by_key(config)
    assert flatten_keys(stored).items() <= found.items()
    idle = {key: found[key] for key in found.keys() - flatten_keys(stored).keys()}
    assert idle.keys() >= {"ppo.gdpo", "ppo.critic_check.every", "rewards.mine.onset"}
    assert found == values_by_key(load_frozen_config(tmp_path))
    assert not any(isinstance(value, Enum) for value in found.values())


def test_failed_write_leaves_the_old_file(
    compose: Compose, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = to_run_config(compose([]))
    write_frozen_config(config, tmp_path)

    def half_a_file(_: DictConfig, path: Path) -> None:
        path.write_text("name: de")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(OmegaConf, "save", half_a_file)
    with pytest.raises(OSError, match="No space left"):
        write_frozen_config(config, tmp_path)
    assert load_frozen_config(tmp_path) == config


@pytest.mark.slow
@pytest.mark.parametrize(
    "overrides",
    [
        ["resume=runs/latest", "ppo.steps=3", "zero=stage2", "experiment=smoke"],
        ["resume=runs/latest", "zero=stage2", "++ppo.steps=3", "model@reward_model=sft_model"],
        ["resume=runs/latest", "hardware.memory_gib=40", "data.cache_dir=elsewhere"],
    ],
)
def test_resume_accepts_what_the_run_has(overrides: list[str], compose: Compose) -> None:
    frozen = to_run_config(compose(["experiment=smoke", "zero=stage2"]))
    apply_resume_overrides(frozen, compose(overrides), overrides)


@pytest.mark.slow
def test_resume_may_be_started_in_another_way(compose: Compose) -> None:
    frozen = to_run_config(
        compose(["launcher.timeout_minutes=5", "launcher.master_port=7", "ppo.steps=3"])
    )
    overrides = ["resume=runs/latest", "launcher.master_port=8", "launcher.hostfile=h", "plan=off"]
    config = apply_resume_overrides(frozen, compose(overrides), overrides)
    assert (config.launcher.master_port, config.launcher.hostfile) == (8, "h")
    assert config.plan == to_run_config(compose(["plan=off"])).plan != frozen.plan
    assert config.launcher.timeout_minutes == 5, "what is not named stays"
    assert config.ppo == frozen.ppo
    assert apply_resume_overrides(frozen, compose([]), []) == frozen


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["ppo.lr_schedule=linear"], "ppo.lr_schedule=linear: the steps so far depend"),
        (["ppo.critic_lr_schedule=cosine"], "ppo.critic_lr_schedule=cosine: the steps so far"),
        (["ppo.epochs=2"], "ppo.epochs=2.0 may end PPO earlier; start a new run from the policy"),
        (["rollout.lag=1"], "rollout.lag=1: the steps so far depend"),
        (["ppo.lr_schedule=inverse_sqrt"], ""),
    ],
)
def test_resume_adds_steps_only_if_the_steps_before_stay(
    words: list[str], told: str, compose: Compose
) -> None:
    frozen = to_run_config(compose(["experiment=smoke", "ppo.lr_schedule=constant", *words]))
    more = compose(more_words := ["resume=runs/latest", "ppo.steps=4"])
    if not told:
        assert apply_resume_overrides(frozen, more, more_words).ppo.steps == 4
        return
    start = "resume=runs/latest ppo.steps=4 (the run was started with ppo.steps=3): "
    with pytest.raises(ConfigError, match=re.escape(start + told)):
        apply_resume_overrides(frozen, more, more_words)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "told"),
    [
        ("ppo.steps=2", "was started with ppo.steps=3; give more than 3, or start a new run with"),
        ("model@reward_model=tiny", "the run was started with reward_model.init=sft, which resume"),
        ("run_dir=elsewhere", "the run was started with run_dir=null, which resume cannot change"),
        ("data=local", "the run was started with data.source=synthetic, which resume cannot"),
        (
            "+model.architecture.rope_theta=10",
            "the run was started with model.architecture.rope_theta=null, which resume cannot",
        ),
        ("rollout=hf", "rollout=hf from_run=runs/latest and the overrides in runs/latest/com"),
        ("sft.lr=1", "start a new run without resume"),
    ],
)
def test_resume_refuses_a_change_with_the_way_that_works(
    change: str, told: str, compose: Compose
) -> None:
    frozen = to_run_config(compose(["experiment=smoke"]))
    overrides = ["resume=runs/latest", change]
    with pytest.raises(ConfigError, match=f"^{re.escape(change)}: .*{re.escape(told)}"):
        apply_resume_overrides(frozen, compose(overrides), overrides)
