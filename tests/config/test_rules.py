"""Bounds of all numbers, texts, batch sizes, and what follows from several keys."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhf.base.errors import ConfigError
from rlhf.config.batches import (
    BatchPlan,
    RolloutPlan,
    batch_plans,
    build_batch_plan,
    divide_exactly,
    num_ranks,
    rollout_plan,
)
from rlhf.config.choices import Phase
from rlhf.config.hydra_errors import schema_types, to_hydra_override
from rlhf.config.roles import has_reward_model, reward_key_by_column, reward_model_base
from rlhf.config.schema.run import RunConfig
from rlhf.config.typed import to_run_config
from tests.conftest import Compose

NUMBERS = {int, float, int | None, float | None, bool | int}
LOCAL = ["data=local", "data.path=x.jsonl"]
RULE = ["phase=pipeline_rule", "model@reward_model=gold"]


def test_every_number_has_a_bound() -> None:
    numbers = {key for key, kind in schema_types().items() if kind in NUMBERS}
    assert set(keys_with_bounds(RunConfig)) == numbers


def keys_with_bounds(of: type, prefix: str = "") -> Iterator[str]:
    """Yield the dotted keys of the fields with a bound, groups within groups included."""
    kinds = get_type_hints(of)
    for each in fields(of):
        if "bound" in each.metadata:
            yield prefix + each.name
        elif is_dataclass(kinds[each.name]):
            yield from keys_with_bounds(kinds[each.name], f"{prefix}{each.name}.")


def test_a_wait_fits_the_timers_of_the_libraries(compose: Compose) -> None:
    keys = [key for key in schema_types() if re.search("timeout|_seconds$|watchdog", key)]
    words = [f"{key}=31536001" for key in keys if "rewards" not in key]
    words += ["launcher.timeout_minutes=1e300"]
    words += ["+rewards.judge={kind: http, url: 'http://host', timeout_seconds: 31536001}"]
    for word in words:
        with pytest.raises(ConfigError, match=r"=\S+: (must be above 0 and at most|expected)"):
            to_run_config(compose([word]))


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ('name="a\nb"', r"name='a\nb': must have no"),
        ('name="a\x1b[31m"', r"name='a\x1b[31m': must have no"),
        ('tracking.tags=["a\x9bb"]', r"tracking.tags='a\x9bb': must have no"),
        ('+model.architecture={a: ["b\tc"]}', r"model.architecture.a='b\tc': must have no"),
        ('rollout.stop=["\x1b"]', r"rollout.stop='\x1b': must have no"),
    ],
)
def test_texts_have_no_control_characters(word: str, message: str, compose: Compose) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        to_run_config(compose([word]))


def test_ordinary_texts_are_allowed(compose: Compose) -> None:
    config = to_run_config(compose(['rollout.stop=["\n\n","\tx"]', "name='日本 👩\u200d💻 é'"]))
    assert config.rollout.stop == ["\n\n", "\tx"]


# ---- divisions


def test_divide_exactly_names_the_nearest_values() -> None:
    message = "a=60: must be a multiple of b=8; use a=56 or 64, or b=6 or 10"
    with pytest.raises(ConfigError, match=f"^{message}$"):
        divide_exactly(60, 8, total_key="a", part_key="b")
    with pytest.raises(ConfigError, match=r"^a=3: must be a multiple of b=8; use a=8, or b=3$"):
        divide_exactly(3, 8, total_key="a", part_key="b")


@given(total=st.integers(1, 500), part=st.integers(1, 500))
def test_values_that_divide_exactly_names_work(total: int, part: int) -> None:
    try:
        assert divide_exactly(total, part, total_key="a", part_key="b") * part == total
    except ConfigError as error:
        named = str(error).partition("; use ")[2]
        totals, parts = (re.findall(r"\d+", half) for half in named.split(", or "))
        assert totals
        assert parts
        for better in totals:
            divide_exactly(int(better), part, total_key="a", part_key="b")
        for better in parts:
            divide_exactly(total, int(better), total_key="a", part_key="b")


@pytest.mark.parametrize(
    ("batch_size", "ranks", "micro", "cap", "plan"),
    [
        (64, 1, None, 64, (64, 64, 1)),  # fits at once
        (64, 1, None, 24, (64, 16, 4)),  # 24 does not divide 64; 16 is the largest that does
        (64, 8, None, 64, (8, 8, 1)),  # a micro batch is never more than the rank's part
        (7, 1, None, 4, (7, 1, 7)),
        (64, 2, 4, 2, (32, 4, 8)),  # said explicitly: the cap is not asked
    ],
)
def test_batch_plan_by_hand(
    batch_size: int, ranks: int, micro: int | None, cap: int, plan: tuple[int, int, int]
) -> None:
    result = build_batch_plan(
        batch_size, key="sft.batch_size", ranks=ranks, micro_batch_size=micro, cap=cap
    )
    assert (result.per_rank, result.micro, result.accumulation) == plan


def test_phases_have_plans_of_their_own(compose: Compose) -> None:
    overrides = ["hardware.ranks_per_node=2", "hardware.nodes=2", "hardware.max_micro_batch_size=8"]
    config = to_run_config(compose(overrides))
    assert num_ranks(config) == 4
    assert batch_plans(config) == {
        Phase.sft: BatchPlan(per_rank=8, micro=8, accumulation=1),  # 32 / 4
        Phase.reward: BatchPlan(per_rank=8, micro=4, accumulation=2),  # 8 sequences: 4 pairs
        Phase.ppo: BatchPlan(per_rank=16, micro=8, accumulation=2),  # 64 / 4
    }
    assert rollout_plan(config) == RolloutPlan(
        per_rank=32,  # 128 / 4
        prompts_per_rank=32,
        mini_batches=2,  # 128 / 64
    )
    config = to_run_config(compose(["phase=reward", "hardware.max_micro_batch_size=1"]))
    assert batch_plans(config) == {Phase.reward: BatchPlan(per_rank=32, micro=1, accumulation=32)}


# ---- several keys


@pytest.mark.parametrize(
    ("estimator", "whitens"),
    [("gae", True), ("reinforce_pp", True), ("rloo", False), ("grpo", False)],
)
def test_whitening_follows_the_estimator_unless_it_is_set(
    estimator: str, whitens: bool, compose: Compose
) -> None:
    chosen = [f"ppo.advantage_estimator={estimator}", "ppo.responses_per_prompt=2"]
    assert to_run_config(compose(chosen)).ppo.whitens_advantages is whitens
    given = [*chosen, f"ppo.whiten_advantages={not whitens}"]
    assert to_run_config(compose(given)).ppo.whitens_advantages is not whitens


def test_without_a_reward_model_the_critic_starts_from_the_sft_model(compose: Compose) -> None:
    parts = "rewards={ends: {kind: stop}, right: {kind: exact, columns: [answer]}}"
    config = to_run_config(compose([*RULE, *LOCAL, to_hydra_override(parts)]))
    assert not has_reward_model(config)
    assert reward_model_base(config)[0] == "model"
    assert reward_key_by_column(config) == {"answer": "rewards.right.columns"}
    mixed = compose([to_hydra_override("rewards={learned: {kind: model}, ends: {kind: stop}}")])
    assert has_reward_model(to_run_config(mixed))


def test_the_reward_phase_keeps_the_columns_that_its_loss_reads(compose: Compose) -> None:
    config = to_run_config(compose(["reward.margin_column=margin", *LOCAL]))
    assert reward_key_by_column(config) == {"margin": "reward.margin_column"}
    scores = "reward.score_columns=[score_chosen,score_rejected]"
    config = to_run_config(compose(["reward.loss=regression", scores, *LOCAL]))
    assert set(reward_key_by_column(config)) == {"score_chosen", "score_rejected"}
