"""From a composed configuration to the one that runs."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from rlhf.base.errors import ConfigError
from rlhf.config.batches import batch_plans
from rlhf.config.choices import Phase, When
from rlhf.config.machine_rates import GIB
from rlhf.config.validation import validate
from rlhf.plan.plan import plan_and_configure, plan_run, resolve_auto
from tests.architectures import sizes
from tests.plan.planned import Compose, changed, plan_of, run_of

pytestmark = pytest.mark.slow

UNKNOWN = ["model=pretrained", "model.path=someone/some-model"]


def test_check_refuses_with_figures_and_ways_out(compose: Compose) -> None:
    config = run_of(compose, "model=opt_13b", "hardware=8xa100_40g", "zero=stage2", "phase=sft")
    with pytest.raises(ConfigError) as refused:
        plan_and_configure(config)
    assert re.fullmatch(
        r"sft needs [\d.]+ GiB on each rank \(training\) and 37\.5 can be used; "
        r"what fits: zero=auto \(ZeRO stage 3.*, [\d.]+ GiB\); .*hardware\.nodes=\d+ \(.*\)\. "
        r"plan=only shows the plan, plan=off skips this check",
        str(refused.value),
    )


def test_check_says_where_nothing_helps(compose: Compose) -> None:
    with pytest.raises(ConfigError, match="the planner finds no change that fits"):
        plan_and_configure(run_of(compose, "hardware.memory_gib=0.1"))


def test_check_passes_what_fits(compose: Compose) -> None:
    config = run_of(compose, "model=opt_1.3b", "hardware=8xa100_80g", "phase=sft")
    decision = plan_and_configure(config)
    assert decision.plan is not None
    assert decision.notes == ()
    assert decision.config == resolve_auto(decision.plan)
    validate(decision.config)


def test_off_changes_nothing(compose: Compose) -> None:
    config = run_of(compose, "model=opt_175b", "model.path=x", "hardware=a6000_48g", "plan=off")
    assert plan_and_configure(config) == (config, None, ())


def test_an_unknown_model_runs_without_a_plan(compose: Compose) -> None:
    config = run_of(compose, *UNKNOWN)
    decision = plan_and_configure(config)
    assert decision.config == config
    assert decision.plan is None
    assert decision.notes == (
        "no plan of memory and time: model.path=someone/some-model has no readable config.json "
        "here and model.architecture has no model_type",
    )
    with pytest.raises(ConfigError, match=r"^plan=only: model\.path=.*model=opt_13b"):
        plan_and_configure(run_of(compose, *UNKNOWN, "plan=only"))


def test_sizes_of_an_experiment_do_not_hide_a_folder(compose: Compose, tmp_path: Path) -> None:
    fields = sizes("llama", 16, 24, heads=4, vocab_size=96)
    (tmp_path / "config.json").write_text(json.dumps(fields))
    pretrained = ["experiment=smoke", "model=pretrained", f"model.path={tmp_path}"]
    assert plan_and_configure(run_of(compose, *pretrained)).plan is not None


def test_what_the_plan_chose_is_written_down(compose: Compose) -> None:
    config = run_of(compose, "model=opt_1.3b", "hardware=8xa100_40g")
    config = changed(
        config,
        ppo={"rollout_batch_size": 8 * 600, "mini_batch_size": 8 * 8},
        rollout={"max_prompt_tokens": 1024, "max_response_tokens": 1024},
    )
    plan = plan_run(config)
    decided = resolve_auto(plan)
    assert not decided.zero.auto
    assert decided.zero == plan.config.zero
    for phase in plan.phases:
        micro = getattr(decided, phase.phase.value).micro_batch_size
        assert micro == phase.micro_batch == batch_plans(decided)[phase.phase].micro
    rows = plan.phases[-1].rows
    assert rows is not None
    assert rows < 600
    assert decided.rollout.max_rows == rows


def test_ranks_on_a_cpu_do_not_shard_weights_that_fit(compose: Compose) -> None:
    # Measured with two ranks: stage 3 takes three times as long as stage 1.
    ranks = ("hardware.ranks_per_node=2", "ppo.steps=60", "hardware.memory_gib=16")
    zero = plan_run(run_of(compose, "experiment=smoke", *ranks)).config.zero
    assert 3 not in (zero.stage, zero.critic_stage)


def test_rows_that_all_fit_stay_open(compose: Compose) -> None:
    words = ("model=opt_125m", "hardware=8xa100_80g", "zero=stage1")
    decided = resolve_auto(plan_of(compose, *words))
    assert decided.rollout.max_rows is None


def test_what_is_given_stays(compose: Compose) -> None:
    config = changed(
        run_of(compose, "model=opt_1.3b", "hardware=8xa100_80g", "zero=stage3"),
        sft={"micro_batch_size": 2},
        rollout={"max_rows": 5, "gather_weights": When.never, "keep_graphs": When.never},
    )
    decided = resolve_auto(plan_run(config))
    assert decided.sft.micro_batch_size == 2
    assert decided.rollout == config.rollout
    assert decided.zero == config.zero


def test_phases_that_do_not_run_stay(compose: Compose) -> None:
    config = run_of(compose, "model=opt_1.3b", "hardware=8xa100_80g")
    decided = resolve_auto(plan_run(changed(config, phase={"order": [Phase.sft]})))
    assert decided.sft.micro_batch_size is not None
    assert decided.ppo == config.ppo
    assert decided.rollout == config.rollout


@pytest.mark.parametrize(
    ("zero", "memory", "way"),
    [("stage3", 80, When.always), ("stage3", 6, When.never), ("stage2", 80, When.auto)],
)
def test_how_weights_are_gathered_for_a_rollout(
    zero: str, memory: int, way: When, compose: Compose
) -> None:
    config = run_of(compose, "model=opt_1.3b", "hardware=8xa100_80g", f"zero={zero}")
    if zero == "stage3":
        small = {"max_live_parameters": 10**6, "prefetch_bucket_size": 10**6}
        config = changed(config, zero=small | {"reduce_bucket_size": 10**6})
    plan = plan_run(changed(config, hardware={"memory_gib": memory}))
    assert resolve_auto(plan).rollout.gather_weights is way


@pytest.mark.parametrize(
    ("words", "way"),
    [
        ([], When.always),
        (["zero=stage3"], When.never),  # whole weights are elsewhere in each rollout
        (["rollout.cuda_graphs=false"], When.never),
        (["rollout.keep_graphs=never"], When.never),
        (["hardware=cpu", "hardware.memory_gib=80"], When.never),
    ],
    ids=str,
)
def test_whether_graphs_are_kept_between_rollouts(
    words: list[str], way: When, compose: Compose
) -> None:
    given = ("model=opt_125m", "hardware=a100_80g", "zero=stage1", "phase=ppo")
    plan = plan_of(compose, *given, "model@reward_model=opt_125m", *words)
    assert resolve_auto(plan).rollout.keep_graphs is way


def test_rows_that_share_pages_are_more(compose: Compose) -> None:
    words = ("model=llama3.1_8b", "hardware=8xh100_80g", "ppo.rollout_batch_size=4096")
    config = run_of(compose, *words, "rollout.max_response_tokens=8192")
    shared = changed(config, rollout={"mean_response_tokens": 2048})
    own, many = (plan_run(each).phases[-1] for each in (config, shared))
    assert many.rows >= 3 * own.rows
    caches = [each.moments["generation"]["kv_cache"] / each.rows for each in (own, many)]
    assert caches[1] < caches[0] / 3


def test_graphs_are_kept_only_beside_what_training_needs(compose: Compose) -> None:
    """A plan may be a tenth off, and evaluations have a KV cache of their own beside it."""
    words = ("model=opt_125m", "hardware=a100_80g", "zero=stage1", "ppo.micro_batch_size=8")
    config = run_of(compose, *words, "rollout.max_rows=32")
    never = plan_run(changed(config, rollout={"keep_graphs": When.never})).phases[-1]
    always = plan_run(changed(config, rollout={"keep_graphs": When.always})).phases[-1]
    kept = always.peak_bytes - never.peak_bytes
    assert kept > 0
    for room, keeps in ((1.2, True), (1.05, False)):
        memory = (never.peak_bytes + kept) * room / GIB
        found = plan_run(changed(config, hardware={"memory_gib": memory})).phases[-1]
        assert found.keeps_graphs is keeps
