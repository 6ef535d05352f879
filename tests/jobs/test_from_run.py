"""A run that starts from another takes what that run determines, and not what its plan chose."""

from __future__ import annotations

from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rlhf.base.errors import ConfigError, RlhfError
from rlhf.config.choices import Phase
from rlhf.config.freeze import write_command, write_frozen_config
from rlhf.config.schema.run import RunConfig
from rlhf.config.typed import to_run_config
from rlhf.jobs.completion import copy_keys_of_source_run, describe_differences_from_source
from rlhf.options.phase_store.phase_store import shared_phases
from rlhf.phases.shared.context import records_with_label_noise
from rlhf.runtime.run_data import load_phase_data
from tests.conftest import Compose

TWO_RANKS = ["hardware.ranks_per_node=2", "zero=stage2"]


@pytest.fixture
def source(compose: Compose, tmp_path: Path) -> Path:
    """A run on one rank whose plan chose micro-batches of 32, and whose command chose reward's."""
    words = ["sft.batch_size=32", "reward.batch_size=32", "reward.micro_batch_size=4"]
    words += ["data.size=600"]  # or generating takes seconds
    config = to_run_config(compose(words))
    write_frozen_config(replace(config, sft=replace(config.sft, micro_batch_size=32)), tmp_path)
    write_command(words, tmp_path)
    return tmp_path


def taken(compose: Compose, source: Path, *words: str) -> RunConfig:
    cfg = compose(list(words))
    copy_keys_of_source_run(cfg, source, [Phase.sft, Phase.reward], words)
    return to_run_config(cfg)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        # the command of the finished run set reward's micro-batches, its plan SFT's
        ([], {"sft.batch_size": 32, "sft.micro_batch_size": None, "reward.micro_batch_size": 4}),
        (["reward.micro_batch_size=2"], {"reward.micro_batch_size": 2}),  # changes no result
        (["sft.micro_batch_size=16"], {"sft.micro_batch_size": 16}),
        (["data.ptx_path=corpus"], {"data.ptx_path": "corpus"}),
        (["data.cache_dir=elsewhere"], {"data.cache_dir": "elsewhere"}),
    ],
)
def test_what_the_finished_run_does_not_determine(
    words: list[str], expected: dict[str, object], compose: Compose, source: Path
) -> None:
    config = taken(compose, source, *TWO_RANKS, *words)
    assert {key: attrgetter(key)(config) for key in expected} == expected


@pytest.mark.parametrize(
    "word", ["data.seed=2", "sft.lr=1", "model=opt_125m", "+model.architecture.rope_theta=1"]
)
def test_what_the_finished_run_determines_is_refused(
    word: str, compose: Compose, source: Path
) -> None:
    with pytest.raises(ConfigError, match=r"the run determines model, reward_model, sft, "):
        taken(compose, source, word)


def test_another_seed_keeps_the_data_of_the_finished_run(compose: Compose, source: Path) -> None:
    """Also if this run is started from in its turn; the phases that it trains take the seed."""
    first, again = taken(compose, source), taken(compose, source, "seed=1")
    assert (first.seed, first.data_seed) == (1, 1)
    assert again == first
    other = taken(compose, source, "seed=2")
    assert (other.seed, other.data_seed) == (2, 1)
    parts = [load_phase_data(config, [].append) for config in (first, other)]
    assert parts[0] == parts[1]
    assert load_phase_data(replace(first, seed=2), [].append) != parts[0]
    write_frozen_config(other, source)
    seeds = [taken(compose, source, *words) for words in ([], ["seed=3"], ["seed=1"])]
    assert [(each.seed, each.data_seed) for each in seeds] == [(2, 1), (3, 1), (1, 1)]


def test_another_seed_swaps_the_same_answers(compose: Compose, source: Path) -> None:
    """DPO of several seeds on one SFT model learns from the same wrong labels."""
    words = ["phase=pipeline_dpo", "dpo.label_noise=0.5"]
    first, other = (taken(compose, source, *words, *more) for more in ([], ["seed=2"]))
    context: Any = SimpleNamespace(config=first, parts=load_phase_data(first, [].append))
    swapped = records_with_label_noise(context, Phase.dpo)
    assert swapped != context.parts[Phase.reward]
    context.config = other
    assert records_with_label_noise(context, Phase.dpo) == swapped


def test_a_phase_after_one_of_another_seed_is_not_shared(compose: Compose, source: Path) -> None:
    """Its hash has the seed of this run only, and the SFT model is of another."""
    own = taken(compose, source, "reuse.phases=always")
    assert shared_phases(own) == [Phase.sft, Phase.reward]
    assert shared_phases(taken(compose, source, "reuse.phases=always", "seed=2")) == []


@pytest.mark.parametrize(
    ("phase", "folder", "told"),
    [
        (Phase.sft, "", "sft starts from no earlier phase; remove from_run"),
        (Phase.ppo, "begun", r"none of the phases that ppo starts from \(sft, reward\)"),
        (Phase.ppo, "nowhere", "is not the directory of a run: there is no such folder"),
    ],
)
def test_a_run_without_a_phase_to_take_is_refused(
    phase: Phase, folder: str, told: str, compose: Compose, source: Path
) -> None:
    (source / "begun").mkdir()
    write_frozen_config(to_run_config(compose([])), source / "begun")
    words = [f"phase={phase}"]
    with pytest.raises(RlhfError, match=told):
        copy_keys_of_source_run(compose(words), source / folder, [phase], words)


def test_keys_of_ppo_that_the_command_leaves_at_other_values_are_named(
    compose: Compose, source: Path
) -> None:
    write_frozen_config(to_run_config(compose(["experiment=smoke", "ppo.kl_ctl=0.3"])), source)
    config = taken(compose, source, "ppo.kl_ctl=0.1")
    (line,) = describe_differences_from_source(config)
    assert line.startswith(f"ppo, unlike in {source}: ")
    assert "ppo.kl_ctl=0.1 instead of 0.3" in line
    assert "ppo.rollout_batch_size=128 instead of 16" in line
    assert "micro_batch" not in line
    again = taken(compose, source, "experiment=smoke", "ppo.kl_ctl=0.3")
    assert describe_differences_from_source(again) == []
    words = ["seed=2", "+rewards.model={kind: model}"]
    other = taken(compose, source, "experiment=smoke", "ppo.kl_ctl=0.3", *words)
    assert other.data.seed == 1, "which is no difference: the data are the same"
    (line,) = describe_differences_from_source(other)
    assert line.endswith(": seed=2 instead of 1, rewards={model: {kind: model}} instead of {}")


BRIEF = "+rewards.brief={kind: length, most: 12}"
JUDGE = "+rewards.judge={kind: model, weight: 0}"


@pytest.mark.parametrize(
    ("words", "order"),
    [
        (["phase=pipeline_rule", BRIEF], ["sft", "ppo"]),
        (["phase=ppo", BRIEF], ["sft", "ppo"]),
        (["phase=ppo", BRIEF, JUDGE], ["sft", "reward", "ppo"]),
        (["phase=ppo"], ["sft", "reward", "ppo"]),
    ],
)
def test_rewards_of_the_command_replace_the_reward_model(
    words: list[str], order: list[str], compose: Compose, source: Path
) -> None:
    config = taken(compose, source, *words)
    assert config.phase.order == order
    line = "".join(describe_differences_from_source(config))
    assert "<" not in line, "no Python"
    assert ("rewards={brief: {kind: length, most: 12}" in line) == (BRIEF in words)
