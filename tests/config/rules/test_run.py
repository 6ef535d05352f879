"""Rules across keys, and the arithmetic of batch sizes."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from typing import get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import DictConfig

from rlhf.base.errors import ConfigError
from rlhf.config.batches import (
    BatchPlan,
    RolloutPlan,
    batch_plan,
    divisors,
    exact_div,
    num_ranks,
    phase_plans,
    rollout_plan,
)
from rlhf.config.choices import Phase
from rlhf.config.freeze import to_run_config
from rlhf.config.hydra_errors import schema_types
from rlhf.config.schema.run import RunConfig

Compose = Callable[[list[str]], DictConfig]

NUMBERS = {int, float, int | None, float | None, bool | int}
TRAINED = ["phase=ppo", "reward_model.init=pretrained", "reward_model.path=folder"]


def test_every_number_has_a_bound() -> None:
    numbers = {key for key, kind in schema_types().items() if kind in NUMBERS}
    assert set(keys_with_bounds(RunConfig)) == numbers


def keys_with_bounds(of: type, prefix: str = "") -> Iterator[str]:
    """Dotted keys of the fields with a bound, groups within groups included."""
    kinds = get_type_hints(of)
    for each in fields(of):
        if "bound" in each.metadata:
            yield prefix + each.name
        elif is_dataclass(kinds[each.name]):
            yield from keys_with_bounds(kinds[each.name], f"{prefix}{each.name}.")


WAITS = [
    key
    for key in schema_types()
    if re.search("timeout|_seconds$|watchdog", key) and "rewards" not in key
]
JUDGE = "+rewards.judge={kind: http, url: 'http://host', timeout_seconds"


@pytest.mark.parametrize("value", ["31536001", "10000000000", "1e300"])
@pytest.mark.parametrize("key", [*WAITS, JUDGE])
def test_a_wait_fits_the_timers_of_the_libraries(key: str, value: str, compose: Compose) -> None:
    word = f"{key}: {value}}}" if key is JUDGE else f"{key}={value}"
    with pytest.raises(ConfigError, match=r"=\S+: (must be above 0 and at most|expected)"):
        to_run_config(compose([word]))


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ('name="a\nb"', r"name='a\nb': must have no"),
        ('name="a\x1b[31m"', r"name='a\x1b[31m': must have no"),
        ('model.end_token="<|\x07|>"', r"model.end_token='<|\x07|>': must have no"),
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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("override", "rule"),
    [
        ("ppo.steps=0", "ppo.steps=0: must be above 0"),
        ("sft.lr=-1e-3", "sft.lr=-0.001: must be above 0"),
        ("ppo.kl_target=0", "ppo.kl_target=0.0: must be above 0"),
        ("reward.lr=nan", "reward.lr=nan: must be above 0"),
        ("reward.lr=inf", "reward.lr=inf: must be above 0"),
        ("rollout.temperature=0", "rollout.temperature=0.0: must be above 0"),
        ("rollout.top_k=-1", "rollout.top_k=-1: must be 0 or more"),
        ("seed=-1", "seed=-1: must be 0 or more"),
        ("ppo.cliprange=1", "ppo.cliprange=1.0: must be at least 0 and below 1"),
        ("ppo.beta2=1", "ppo.beta2=1.0: must be at least 0 and below 1"),
        ("ppo.lam=1.1", "ppo.lam=1.1: must be from 0 to 1"),
        ("ppo.gamma=0", "ppo.gamma=0.0: must be above 0 and at most 1"),
        ("rollout.top_p=0", "rollout.top_p=0.0: must be above 0 and at most 1"),
        ("data.eval_share=1", "data.eval_share=1.0: must be above 0 and below 1"),
        ("zero.stage=4", "zero.stage=4: must be 0, 1, 2 or 3"),
        ("name=a/b", "name=a/b: must be the name of a folder in runs/"),
        ("name=..", "name=..: must be the name of a folder in runs/"),
        ("name=latest", "name=latest: must be the name of a folder in runs/"),
        ("phase.order=[]", "phase.order=[]: must list one phase or more"),
        ("phase.order=[ppo,sft]", "phase.order=[ppo,sft]: must list one phase or more, each on"),
        ("phase.order=[sft,sft]", "in the order sft, reward, ppo"),
        (
            "model.init=sft",
            "model.init=sft: only reward_model.init can be sft; use model.init=pret",
        ),
        (
            "model.init=gold",
            "model.init=gold: only reward_model.init can be gold; use model.init=p",
        ),
        ("model@reward_model=gold", "reward_model.init=gold with the reward phase: a judge is not"),
        ("model=opt_175b", "model.path=null: model.init=pretrained needs a path; add model.path="),
        ("reward_model.init=pretrained", "reward_model.path=null: reward_model.init=pretrained"),
        ("reward_model.init=random", "reward_model.architecture has no model_type: reward_model."),
        ("model.vocab_size=0", "model.vocab_size=0: must be above 0 to train a tokenizer"),
        ("phase=ppo", "model.init=random: PPO starts from an SFT model; add model.init=pretrained"),
        ("phase.order=[sft,ppo]", "reward_model.init=sft: PPO needs a trained reward model; add"),
        ("sft.max_tokens=1025", "sft.max_tokens=1025: the model has 1024 positions (model.archit"),
        ("reward.max_tokens=1025", "reward.max_tokens=1025: the model has 1024 positions"),
        (
            "rollout.max_prompt_tokens=1000",
            "rollout.max_prompt_tokens + rollout.max_response_tokens=1032: the model has 1024",
        ),
        ("data.path=a.jsonl", "data.path=a.jsonl: generated data has no path; add data=local"),
        ("data.size=0", "data.size=0: must be positive for data=synthetic"),
        ("data.source=local", "data.path=null: must be a file, a folder or a hub id"),
        ("data.eval_path=7", "data.eval_path=7: must be a file, a folder or a hub id"),
        ("data.eval_path=[]", "data.eval_path=[]: must be a file, a folder or a hub id"),
        ("data.split=[1,2]", "data.split=[1.0, 2.0]: must be three numbers"),
        ("data.split=[1,-2,1]", "data.split=[1.0, -2.0, 1.0]: must be three numbers"),
        ("data.split=[1,0,1]", "the reward phase runs and has no share; make the number of reward"),
    ],
)
def test_rule(override: str, rule: str, compose: Compose) -> None:
    with pytest.raises(ConfigError, match=re.escape(rule)):
        to_run_config(compose([override]))


def test_the_judge_scores_its_own_task_only(compose: Compose) -> None:
    gold = ["phase=pipeline_rule", "model@reward_model=gold"]
    to_run_config(compose(gold))
    with pytest.raises(
        ConfigError, match=r"with data\.source=local: the judge scores the prompts of"
    ):
        to_run_config(compose([*gold, "data=local", "data.path=pairs.jsonl"]))


@pytest.mark.slow
@pytest.mark.parametrize(
    "overrides",
    [
        ["ppo.kl_target=null", "ppo.cliprange_value=null", "ppo.cliprange=0", "ppo.lam=0"],
        ["ppo.gamma=1", "rollout.top_p=1", "hardware.dtype=fp16"],
        ["phase=reward"],  # reward_model=sft_model starts from model where no sft phase runs
        [*TRAINED, "model.init=pretrained", "model.path=folder"],
        ["phase=sft", "data.split=[1,0,0]"],
        ["phase=sft", "ppo.rollout_batch_size=7", "rollout.max_prompt_tokens=5000"],
        ["model=opt_125m", "sft.max_tokens=5000"],  # its length is in the weights' own config
        ["model.vocab_size=0", "model.tokenizer=gpt2"],
        ["model@reward_model=tiny", "model=opt_125m", "sft.max_tokens=2000"],
        ["data=hub", "data.path=[a/b,c/d]", "data.eval_path=e/f"],
    ],
)
def test_allowed(overrides: list[str], compose: Compose) -> None:
    to_run_config(compose(overrides))


def test_reward_model_of_its_own_has_its_own_length(compose: Compose) -> None:
    own = ["model=opt_125m", "model@reward_model=tiny", "reward.max_tokens=1025"]
    with pytest.raises(ConfigError, match=r"\(reward_model\.architecture\.max_position_embed"):
        to_run_config(compose(own))


def test_divisors_are_found_in_pairs() -> None:
    for number in range(1, 200):
        assert divisors(number) == [d for d in range(1, number + 1) if number % d == 0]


def test_exact_div_names_the_nearest_values() -> None:
    message = "a=60 is not a multiple of b=8: use a=56 or 64, or b=6 or 10"
    with pytest.raises(ConfigError, match=f"^{message}$"):
        exact_div(60, 8, total_key="a", part_key="b")
    with pytest.raises(ConfigError, match=r"^a=3 is not a multiple of b=8: use a=8, or b=3$"):
        exact_div(3, 8, total_key="a", part_key="b")


@given(total=st.integers(1, 500), part=st.integers(1, 500))
def test_values_that_exact_div_names_work(total: int, part: int) -> None:
    try:
        assert exact_div(total, part, total_key="a", part_key="b") * part == total
    except ConfigError as error:
        named = str(error).partition(": use ")[2]
        totals, parts = (re.findall(r"\d+", half) for half in named.split(", or "))
        assert totals
        assert parts
        for better in totals:
            exact_div(int(better), part, total_key="a", part_key="b")
        for better in parts:
            exact_div(total, int(better), total_key="a", part_key="b")


@pytest.mark.parametrize(
    ("batch_size", "ranks", "micro", "cap", "plan"),
    [
        (64, 1, None, 64, (64, 64, 1)),  # fits at once
        (64, 1, None, 24, (64, 16, 4)),  # 24 does not divide 64; 16 is the largest that does
        (64, 8, None, 64, (8, 8, 1)),  # a micro batch is never more than the rank's part
        (48, 2, None, 16, (24, 12, 2)),
        (7, 1, None, 4, (7, 1, 7)),
        (64, 2, 4, 2, (32, 4, 8)),  # said explicitly: the cap is not asked
    ],
)
def test_batch_plan_by_hand(
    batch_size: int, ranks: int, micro: int | None, cap: int, plan: tuple[int, int, int]
) -> None:
    result = batch_plan(
        batch_size, key="sft.batch_size", ranks=ranks, micro_batch_size=micro, cap=cap
    )
    assert (result.per_rank, result.micro, result.accumulation) == plan


@given(per_rank=st.integers(1, 200), ranks=st.integers(1, 16), cap=st.integers(1, 300))
def test_batch_plan_is_exact(per_rank: int, ranks: int, cap: int) -> None:
    size = per_rank * ranks
    plan = batch_plan(size, key="k", ranks=ranks, micro_batch_size=None, cap=cap)
    assert plan.micro * plan.accumulation * ranks == size
    assert plan.micro <= cap


def test_phases_have_plans_of_their_own(compose: Compose) -> None:
    overrides = ["hardware.ranks_per_node=2", "hardware.nodes=2", "hardware.max_micro_batch_size=8"]
    config = to_run_config(compose(overrides))
    assert num_ranks(config) == 4
    assert phase_plans(config) == {
        Phase.sft: BatchPlan(per_rank=8, micro=8, accumulation=1),  # 32 / 4
        Phase.reward: BatchPlan(per_rank=8, micro=4, accumulation=2),  # 8 sequences: 4 pairs
        Phase.ppo: BatchPlan(per_rank=16, micro=8, accumulation=2),  # 64 / 4
    }
    assert rollout_plan(config) == RolloutPlan(
        per_rank=32,  # 128 / 4
        prompts_per_rank=32,
        mini_batches=2,  # 128 / 64
    )


def test_pair_runs_where_two_sequences_are_too_many(compose: Compose) -> None:
    config = to_run_config(compose(["phase=reward", "hardware.max_micro_batch_size=1"]))
    assert phase_plans(config) == {Phase.reward: BatchPlan(per_rank=32, micro=1, accumulation=32)}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["sft.batch_size=60", "hardware.ranks_per_node=8"],
            "sft.batch_size=60 is not a multiple of hardware.nodes*hardware.ranks_per_node=8: "
            "use sft.batch_size=56 or 64",
        ),
        (
            ["reward.micro_batch_size=5"],
            "reward.batch_size/ranks=32 is not a multiple of reward.micro_batch_size=5: "
            "use reward.batch_size/ranks=30 or 35, or reward.micro_batch_size=4 or 8",
        ),
        (
            ["ppo.rollout_batch_size=96"],
            "ppo.rollout_batch_size=96 is not a multiple of ppo.mini_batch_size=64: "
            "use ppo.rollout_batch_size=64 or 128, or ppo.mini_batch_size=48 or 96",
        ),
        (
            ["ppo.rollout_batch_size=130", "ppo.mini_batch_size=64", "hardware.nodes=4"],
            "ppo.rollout_batch_size=130 is not a multiple of hardware.nodes*",
        ),
        (["ppo.mini_batch_size=63", "hardware.nodes=2"], "ppo.mini_batch_size=63 is not a mul"),
        (["ppo.micro_batch_size=128"], "ppo.mini_batch_size/ranks=64 is not a multiple of"),
    ],
)
def test_inexact_division_is_refused(overrides: list[str], message: str, compose: Compose) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        to_run_config(compose(overrides))


@pytest.mark.parametrize(
    ("words", "with_"),
    [
        (["zero=stage3"], "zero.stage=3, which gathers weights in each layer"),
        (["ppo.shared_trunk=true", "ppo.num_layers_unfrozen=1"], "ppo.shared_trunk=true, which"),
        (["rollout=hybrid_engine", "hardware=a100_80g"], "rollout.backend=hybrid_engine, which"),
    ],
)
def test_compiled_layers_are_taken_apart_by_nothing(
    words: list[str], with_: str, compose: Compose
) -> None:
    to_run_config(compose(words))
    with pytest.raises(ConfigError, match=re.escape(f"model.compile=true with {with_}")):
        to_run_config(compose([*words, "model.compile=true"]))
